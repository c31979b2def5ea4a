"""What the scheduler refuses when Triton loads it, whoever has started Triton."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from charonia.config import EngineArgs, SchedulerArgs
from charonia.errors import ConfigError
from charonia.events import Log
from charonia.server_options import ServerOptions
from charonia.serving.hosts.scheduler import SchedulerHost, _read_args
from support.sockets import refuse_threads

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


def test_what_could_not_be_started_is_started_by_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, {})
    (tmp_path / "scheduler" / "1").mkdir(parents=True)
    monkeypatch.setattr(ServerOptions, "of_process", lambda pid: ServerOptions([]))
    args = {
        "model_config": "{}",
        "model_name": "scheduler",
        "model_version": "1",
        "model_repository": str(tmp_path / "scheduler"),
    }
    host = SchedulerHost(Mock(), args, log=Log(print, lambda: "info"))
    for name in ("charonia-scheduling", "charonia-listener"):
        with monkeypatch.context() as patch:
            refuse_threads(patch, name)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                host.execute([])
    host.execute([])
    assert host._service.state.last_turn_at is not None
    host.finalize()


def test_an_engine_that_was_loaded_by_hand_needs_them_as_well(tmp_path: Path) -> None:
    model_file = write_model(tmp_path, WHOLE_PROMPTS)
    scheduler_args = SchedulerArgs(inter_token_target_ms=20.0)
    with pytest.raises(ConfigError, match=REFUSAL):
        _read_args(model_file, scheduler_args, EngineArgs(model="echo"), "a tokenizer")
