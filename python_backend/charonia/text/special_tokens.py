"""Tokens that a checkpoint's configuration names, or makes special.

Owns which of its files count. Knows nothing about a tokenizer.
"""

from pathlib import Path
from typing import Any

from charonia.checkpoint_files import read_json_object

CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def read_token_config(directory: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, and special_tokens_map.json if the former lists no added tokens.

    Raises:
        CheckpointError: one of them is not a JSON object.
    """
    config = read_json_object(directory / CONFIG_FILE, is_optional=True)
    if "added_tokens_decoder" not in config:
        config |= read_json_object(directory / SPECIAL_TOKENS_FILE, is_optional=True)
    return config


def contents_of_named(config: dict[str, Any]) -> dict[str, str]:
    """The texts of named tokens, such as `eos_token`, that the configuration has."""
    found = {}
    further = config.get("extra_special_tokens")
    entries = {name: config.get(name) for name in NAMED_TOKENS}
    for name, entry in (entries | (further if isinstance(further, dict) else {})).items():
        content = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(content, str):
            found[name] = content
    return found
