"""The families of models, one file each, by their name in config.json.

To add a family whose layers are made of existing sublayers:

1. Write its file: a `Family` with the keys of its configuration class in transformers.
2. List it in `FAMILIES`.
3. Add it to `tests/support/checkpoints.py` and `configurations.py`, so that tests compare it with
   transformers, and to the names in `tests/data/test_spec.py`. Add its keys to the table of
   model_repository/README.md, and its architecture to README.md.

A family with another sublayer, activation or norm needs more: see `sublayers` and `ops.base`.
"""

from collections.abc import Mapping
from typing import Any

from charonia.data.model.families.family import Family
from charonia.data.model.families.llama import LLAMA
from charonia.data.model.families.mistral import MISTRAL
from charonia.data.model.families.qwen2 import QWEN2
from charonia.data.model.families.qwen3 import QWEN3
from charonia.errors import CheckpointError, shown

FAMILIES = {family.architecture: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}


def family_of(values: Mapping[str, Any]) -> Family:
    """Find the family of a configuration, by its architecture and its `model_type`.

    Raises:
        CheckpointError: the family is not supported, or architecture and model_type do not match.
    """
    names = values.get("architectures")
    known = [name for name in FAMILIES if isinstance(names, list) and name in names]
    if not known:
        raise CheckpointError(
            f"unsupported architecture {shown(names)}; accepted are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[known[0]]
    model_type = values.get("model_type", family.model_type)
    if model_type != family.model_type:
        raise CheckpointError(
            f"model_type of {family.architecture} must be {family.model_type!r}, but is"
            f" {shown(model_type)}"
        )
    return family
