"""Engine arguments of vLLM's: without effect and said so, or refused."""

from typing import Any

import pytest

from charonia import vllm_args
from charonia.config import EngineArgs
from charonia.errors import ConfigError

# What the samples and the documentation of vLLM's backend for Triton put into model.json.
OF_SAMPLES = {
    "disable_log_requests": True,
    "disable_log_stats": False,
    "enable_lora": False,
    "enforce_eager": True,
    "load_format": "auto",
    "max_lora_rank": 16,
    "trust_remote_code": False,
}


def test_what_has_no_effect_is_left_out_with_a_line_for_each() -> None:
    lines: list[str] = []
    args = EngineArgs.from_dict({"model": "m", "max_num_seqs": 3} | OF_SAMPLES, lines.append)
    assert args == EngineArgs(model="m", max_num_seqs=3)
    for line, (name, value) in zip(lines, OF_SAMPLES.items(), strict=True):
        assert line.startswith(f"engine argument {name} = {value!r} has no effect: ")


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("trust_remote_code", True, "False or None"),
        ("enable_lora", True, "False or None"),
        ("load_format", "gguf", "'auto' or 'safetensors' or None"),
        ("hf_overrides", {"rope_theta": 1}, "{} or None"),
        ("cpu_offload_gb", 4, "0 or None"),
        ("data_parallel_size", 2, "1 or None"),
        ("data_parallel_size", True, "1 or None"),
        ("enable_lora", 0, "False or None"),
    ],
)
def test_what_would_have_an_effect_is_refused(name: str, value: Any, accepted: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineArgs.from_dict({"model": "m", name: value})
    text = str(error.value)
    assert text.startswith(f"engine argument {name} = {value!r} is not supported: ")
    assert text.endswith(f"; accepted is {accepted}")


def test_vllms_own_defaults_are_taken_however_they_are_written() -> None:
    values = {"scheduler_delay_factor": 0.0, "cpu_offload_gb": 0.0, "task": None, "revision": None}
    assert EngineArgs.from_dict({"model": "m"} | values) == EngineArgs(model="m")


def test_a_secret_is_not_logged() -> None:
    lines: list[str] = []
    EngineArgs.from_dict({"model": "m", "hf_token": "hf_secret"}, lines.append)
    assert len(lines) == 1
    assert "secret" not in lines[0]


def test_any_other_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown engine argument 'num_hidden_layers'"):
        EngineArgs.from_dict({"model": "m", "num_hidden_layers": 2})


def test_nothing_that_has_an_effect_is_called_without() -> None:
    without = {name for names in vllm_args.BY_REASON.values() for name in names}
    assert not without & set(EngineArgs.__struct_fields__)
