"""What all tests share: checkpoints, made once per process, and how Hypothesis is set."""

import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from run import STARTS_PROCESSES
from support.behind_proxy import BEHIND_PROXY
from support.leftovers import temporary_directory

pytest_plugins = ["support.failures", "support.timeouts"]
collect_ignore = ["clients"]  # need packages of their own: `make gateway-clients`

# A machine with other work is slow at times, of which no test should say anything.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

COVERING = ("control", "core", "text")
"""Folders of tests that cover what the coverage gate asks for. Others are not traced, which takes
processor time: a third more in `text`, where it was measured."""

# Torch's threads would spin while they wait for each other, and keep the cores from the tests
# beside these: on two busy cores that took twice the time. Before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have files that wait and files that compute take turns, so that both run side by side."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    tests = Path(__file__).parent
    waiting, computing = [], []
    for path, own in files.items():
        folder = path.relative_to(tests).parts[0]
        (waiting if folder in STARTS_PROCESSES else computing).append(own)
        for item in own if folder not in COVERING else ():
            item.add_marker("no_cover")
    turns = zip_longest(waiting, computing, fillvalue=[])
    items[:] = chain.from_iterable(chain.from_iterable(turns))


@pytest.fixture(scope="session", autouse=True)
def own_temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of this process, and of those that it starts, are in a directory of its own.

    There a run of the server is found, and one that was killed is swept: other processes' tests,
    and this machine's other servers, are neither seen nor touched.
    """
    tmp_path_factory.getbasetemp()  # stays where it is
    with (
        temporary_directory(os.getpid()) as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", directory)
        patch.setattr(tempfile, "tempdir", directory)
        yield


@pytest.fixture
def behind_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names a proxy that nobody can reach."""
    for name, value in BEHIND_PROXY.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`support.checkpoints.make_checkpoint` without the directory; equal calls share one."""
    made: dict[str, Path] = {}

    def make(architecture: str = "LlamaForCausalLM", **settings: Any) -> Path:
        # Here, so that tests that need no checkpoint do not wait for transformers.
        from support.checkpoints import make_checkpoint

        key = repr((architecture, sorted(settings.items())))
        if key not in made:
            made[key] = make_checkpoint(
                tmp_path_factory.mktemp(architecture), architecture, **settings
            )
        return made[key]

    return make
