"""Who runs where: the engine on all cores, the rest beside its first."""

import os
import sys
from pathlib import Path

import pytest

from charonia.config import EngineArgs
from charonia.launch.server import cores
from charonia.launch.server.cores import cores_beside_engine
from charonia.launch.server.processes import start_leader
from charonia.serving.hosts.cores import VARIABLE, take_engine_cores

ALLOWED = sorted(os.sched_getaffinity(0))
PRINT = "import os; print(sorted(os.sched_getaffinity(0)))"
needs_two = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two cores")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cores, "_GPU", tmp_path / "none")


def checkpoint(directory: Path, num_bytes: int = cores.MIN_WEIGHT_BYTES) -> str:
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)  # a hole: it takes no space
    return str(directory)


@needs_two
def test_all_but_the_engine_keeps_off_the_first_core(tmp_path: Path) -> None:
    args = EngineArgs(model=checkpoint(tmp_path))
    assert cores_beside_engine(args) == frozenset(ALLOWED[1:])


@needs_two
def test_the_first_core_is_the_first_that_is_named(tmp_path: Path) -> None:
    named = f"{ALLOWED[1]},{ALLOWED[0]}"
    args = EngineArgs(model=checkpoint(tmp_path), cpu_binding=named)
    assert cores_beside_engine(args) == frozenset(ALLOWED) - {ALLOWED[1]}


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_binding": "none"},
        {"cpu_threads": 1},
        {"cpu_kernels": "torch"},
        {"device": "cuda"},
        {"tensor_parallel_size": 2},
    ],
)
def test_an_engine_that_binds_no_threads_gets_no_core_for_itself(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    values = {"model": checkpoint(tmp_path)} | changes
    assert cores_beside_engine(EngineArgs.from_dict(values)) is None


def test_nor_does_one_on_a_gpu_or_with_a_small_model(tmp_path: Path) -> None:
    args = EngineArgs(model=checkpoint(tmp_path, cores.MIN_WEIGHT_BYTES - 1))
    assert cores_beside_engine(args) is None
    args = EngineArgs(model=checkpoint(tmp_path))
    (tmp_path / "none").touch()
    assert cores_beside_engine(args) is None


@needs_two
def test_a_process_started_on_some_cores_can_take_the_engines() -> None:
    env = dict(os.environ)
    process = start_leader([sys.executable, "-c", PRINT], env, {ALLOWED[1]})
    assert process.communicate()[0].decode().strip() == str([ALLOWED[1]])
    take = (
        f"from charonia.serving.hosts.cores import take_engine_cores; take_engine_cores(); {PRINT}"
    )
    env[VARIABLE] = ",".join(map(str, ALLOWED))
    process = start_leader([sys.executable, "-c", take], env, {ALLOWED[1]})
    assert process.communicate()[0].decode().strip() == str(ALLOWED)


def test_without_the_variable_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    take_engine_cores()
    assert sorted(os.sched_getaffinity(0)) == ALLOWED
