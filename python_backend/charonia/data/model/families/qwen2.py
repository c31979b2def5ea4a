"""Qwen2 and Qwen2.5: a Llama with biases of queries, keys and values only.

Some of its layers may have a sliding window: those from `max_window_layers` on, or those that
`layer_types` names.
"""

from typing import Any

from charonia.data.model.config_keys import Fixed, Keys
from charonia.data.model.config_values import ConfigValues
from charonia.data.model.families.family import Family, window_of_all_layers
from charonia.errors import CheckpointError, shown

HONOURED: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
NULLABLE = "num_key_value_heads sliding_window layer_types"
_SLIDING = "sliding_attention"


def window_of_some_layers(config: ConfigValues) -> int | None:
    """The window of the layers that have one; None if every layer attends to everything."""
    window = window_of_all_layers(config)
    if not config.flag("use_sliding_window"):
        window = None
    num_layers = config.integer("num_hidden_layers")
    first = config.integer("max_window_layers", least=0)
    layer_types = config.get("layer_types")
    if layer_types is None:
        return window if first < num_layers else None
    _check_layer_types(layer_types, num_layers)
    if _SLIDING not in layer_types:
        return None
    if window is None:
        raise CheckpointError(
            f"layer_types has {_SLIDING!r}, for which there must be a sliding_window and"
            " use_sliding_window: true"
        )
    return window


def _check_layer_types(layer_types: Any, num_layers: int) -> None:
    is_list = isinstance(layer_types, list)
    if not is_list or any(layer not in ("full_attention", _SLIDING) for layer in layer_types):
        raise CheckpointError(
            f"layer_types must list 'full_attention' or {_SLIDING!r} for each layer, but is"
            f" {shown(layer_types)}"
        )
    if len(layer_types) != num_layers:
        raise CheckpointError(
            f"layer_types must be as many as num_hidden_layers ({num_layers}), but are"
            f" {len(layer_types)}"
        )


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    keys=Keys.of(
        {**HONOURED, "head_dim": None},
        nullable=NULLABLE,
        fixed={
            "attention_bias": Fixed((True,), "queries, keys and values always have a bias"),
            "mlp_bias": Fixed((False,)),
        },
    ),
    window=window_of_some_layers,
    has_output_bias=False,
)
