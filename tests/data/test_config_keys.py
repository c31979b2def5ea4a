"""Every key of config.json is read, changes nothing, or is refused; nothing is passed over."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from charonia.data.model.config_keys import GENERATION, WITHOUT_EFFECT, Fixed
from charonia.data.model.families import FAMILIES
from charonia.data.model.spec import ModelSpec
from charonia.errors import CheckpointError
from charonia.sampling_defaults import DEFAULT_KEYS
from support import configurations
from support.configurations import base

README = Path(__file__).parents[2] / "model_repository" / "README.md"

pytestmark = pytest.mark.parametrize("architecture", FAMILIES)

OTHER: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gemma",
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "eos_token_id": 9,
    "dtype": "bfloat16",
    "torch_dtype": "float16",
    "rope_theta": 5.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "partial_rotary_factor": 0.5,
    "sliding_window": 16,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "layer_types": ["full_attention", "full_attention"],
}
"""For every key that is read, another value than `base` has."""


def config_class(architecture: str) -> Any:
    return getattr(transformers, architecture.replace("ForCausalLM", "Config"))


def read(directory: Path, values: dict[str, Any]) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(values))
    return ModelSpec.from_dir(directory)


def keys_of(architecture: str) -> set[str]:
    """What transformers writes into a config.json, or reads from one into a field."""
    config = config_class(architecture)()
    fields = {field.name for field in dataclasses.fields(config)}
    return fields | config.to_dict().keys() | config.to_diff_dict().keys()


def codes(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in sorted(keys)) or "no others"


def values_of(fixed: Mapping[str, Fixed]) -> str:
    shown = {
        key: " or ".join(json.dumps(value) for value in one.accepted) or "not there"
        for key, one in sorted(fixed.items())
    }
    return ", ".join(f"`{key}` {values}" for key, values in shown.items())


def test_the_readme_lists_every_key(architecture: str) -> None:
    known = FAMILIES[architecture].keys
    many = [family.keys for family in FAMILIES.values()]
    model_type = FAMILIES[architecture].model_type
    read_by_all = set.intersection(*(set(one.honoured) for one in many))
    fixed_for_all = set.intersection(*(set(one.fixed) for one in many))
    own = {key: one for key, one in known.fixed.items() if key not in fixed_for_all}
    rows = [
        f"| read | all | {codes(read_by_all)} |",
        f"| read | {model_type} | {codes(known.honoured.keys() - read_by_all)} |",
        f"| must be | all | {values_of({key: known.fixed[key] for key in fixed_for_all})} |",
        f"| must be | {model_type} | {values_of(own)} |",
        f"| must be, without generation_config.json | all | {values_of(GENERATION)} |",
        f"| a default of sampling | all | {codes(DEFAULT_KEYS)} |",
        f"| anything | all | {codes(WITHOUT_EFFECT)} |",
    ]
    text = README.read_text(encoding="utf-8")
    for row in rows:
        assert f"\n{row}\n" in text


def test_we_have_decided_about_every_field_of_transformers(architecture: str) -> None:
    known = FAMILIES[architecture].keys
    fields = keys_of(architecture)
    assert len(fields) > 25
    assert fields <= known.honoured.keys() | known.fixed.keys() | WITHOUT_EFFECT | DEFAULT_KEYS


def test_a_key_is_in_one_list_alone(architecture: str) -> None:
    known = FAMILIES[architecture].keys
    assert not known.honoured.keys() & known.fixed.keys()
    assert not (known.honoured.keys() | known.fixed.keys()) & WITHOUT_EFFECT
    assert not (known.honoured.keys() | known.fixed.keys() | WITHOUT_EFFECT) & GENERATION.keys()
    others = known.honoured.keys() | known.fixed.keys() | WITHOUT_EFFECT | GENERATION.keys()
    assert not others & DEFAULT_KEYS
    assert known.nullable <= known.honoured.keys()


def test_a_missing_key_stands_for_what_it_does_in_transformers(architecture: str) -> None:
    known = FAMILIES[architecture].keys
    fields = {field.name: field for field in dataclasses.fields(config_class(architecture))}
    ours = {key: known.default(key) for key in (known.honoured | known.fixed) if key in fields}
    # A class's own eos_token_id is a default that `generate` does not have.
    theirs = {key: fields[key].default for key in ours} | {"eos_token_id": None}
    assert ours == theirs
    assert FAMILIES[architecture].model_type == config_class(architecture).model_type


def test_null_is_taken_where_transformers_takes_it_and_refused_elsewhere(
    architecture: str, tmp_path: Path
) -> None:
    known = FAMILIES[architecture].keys
    fields = {field.name for field in dataclasses.fields(config_class(architecture))}
    for key in sorted((known.honoured | known.fixed).keys() & fields - {"architectures"}):
        values = base(architecture, **{key: None})
        try:
            config_class(architecture)(**values)
        except StrictDataclassError:
            with pytest.raises(CheckpointError, match=f"{key} .*None"):
                read(tmp_path, values)
        else:
            read(tmp_path, values)


def test_a_key_that_is_read_changes_what_is_read_or_is_refused_by_name(
    architecture: str, tmp_path: Path
) -> None:
    before = read(tmp_path, base(architecture))
    refused = {"architectures", "model_type", "partial_rotary_factor"}
    for key in FAMILIES[architecture].keys.honoured.keys() - refused:
        assert read(tmp_path, base(architecture, **{key: OTHER[key]})) != before, key
    for key in refused:
        with pytest.raises(CheckpointError, match=key.removesuffix("s")):
            read(tmp_path, base(architecture, **{key: OTHER[key]}))


def test_a_key_that_must_have_some_value_is_refused_by_name_with_another(
    architecture: str, tmp_path: Path
) -> None:
    before = read(tmp_path, base(architecture))
    for key, fixed in (FAMILIES[architecture].keys.fixed | GENERATION).items():
        for value in fixed.accepted:
            assert read(tmp_path, base(architecture, **{key: value})) == before
        wrong = configurations.REFUSED.get(key, "something else")
        with pytest.raises(CheckpointError, match=f"unsupported {key} .*; accepted is"):
            read(tmp_path, base(architecture, **{key: wrong}))


def test_what_generate_does_is_passed_over_beside_generation_config_json(
    architecture: str, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text("{}")
    before = read(tmp_path, base(architecture))
    wrong = {key: configurations.REFUSED[key] for key in GENERATION}
    assert read(tmp_path, base(architecture, **wrong)) == before


def test_a_key_without_effect_is_passed_over(architecture: str, tmp_path: Path) -> None:
    """That transformers passes over it too is shown in tests/parity."""
    before = read(tmp_path, base(architecture))
    assert configurations.WITHOUT_EFFECT.keys() == WITHOUT_EFFECT
    assert configurations.SAMPLING.keys() == DEFAULT_KEYS
    for key, value in (configurations.WITHOUT_EFFECT | configurations.SAMPLING).items():
        assert read(tmp_path, base(architecture, **{key: value})) == before


def test_any_other_key_is_refused_by_name_and_value(architecture: str, tmp_path: Path) -> None:
    for key, value in configurations.UNKNOWN.items():
        with pytest.raises(CheckpointError, match=f"unknown key '{key}' = ") as caught:
            read(tmp_path, base(architecture, **{key: value}))
        assert repr(value) in str(caught.value)


def test_what_transformers_itself_writes_is_taken(architecture: str, tmp_path: Path) -> None:
    small = base(architecture)
    del small["architectures"]
    config = config_class(architecture)(**small)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    assert ModelSpec.from_dir(tmp_path).vocab_size == small["vocab_size"]
    # All keys, those too that have the defaults of every class.
    assert read(tmp_path, json.loads(config.to_json_string(use_diff=False)))
