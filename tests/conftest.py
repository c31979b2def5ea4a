"""What all tests share: checkpoints, made once per session, and how Hypothesis is set."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A machine with other work is slow at times, of which no test should say anything.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


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
