"""What the scheduler refuses when Triton loads it, whoever has started Triton."""

import json
from pathlib import Path
from typing import Any

import pytest

from charonia.config import EngineArgs, SchedulerArgs
from charonia.errors import ConfigError
from charonia.events import Log
from charonia.serving.hosts.scheduler import SchedulerHost, _read_args

REFUSAL = r"inter_token_target_ms = 20\.0 has no effect with enable_chunked_prefill = false"
WHOLE_PROMPTS = {"model": "echo", "enable_chunked_prefill": False}


def write_model(repository: Path, values: dict[str, Any]) -> Path:
    path = repository / "engine" / "1" / "model.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def test_a_target_between_tokens_needs_prompts_that_can_be_cut(tmp_path: Path) -> None:
    write_model(tmp_path, WHOLE_PROMPTS)
    parameters = {"inter_token_target_ms": {"string_value": "20"}}
    args = {
        "model_config": json.dumps({"parameters": parameters}),
        "model_repository": str(tmp_path / "scheduler"),
    }
    with pytest.raises(ConfigError, match=REFUSAL):
        SchedulerHost(None, args, log=Log(print, lambda: "info"))


def test_an_engine_that_was_loaded_by_hand_needs_them_as_well(tmp_path: Path) -> None:
    model_file = write_model(tmp_path, WHOLE_PROMPTS)
    scheduler_args = SchedulerArgs(inter_token_target_ms=20.0)
    with pytest.raises(ConfigError, match=REFUSAL):
        _read_args(model_file, scheduler_args, EngineArgs(model="echo"), "a tokenizer")
