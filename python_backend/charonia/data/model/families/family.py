"""The differences between families of models.

Owns the record that each family fills in, in a file of its own. Must not know tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from charonia.data.model.config_keys import Keys
from charonia.data.model.config_values import ConfigValues

SublayerName = Literal["attention", "mlp"]


def window_of_all_layers(config: ConfigValues) -> int | None:
    """The sliding window of models whose layers all have the same; None if there is none."""
    return None if config.get("sliding_window") is None else config.integer("sliding_window")


@dataclass(frozen=True)
class Family:
    """A family of models: the keys of its config.json, and properties that have no key.

    Attributes:
        architecture: its name in config.json.
        model_type: by which transformers chooses the model.
        keys: of config.json.
        sublayers: of each layer, in order. Each kind at most once, because its tensors' names and
            the layer's KV cache are for one of a kind.
        window: the smallest sliding window of its layers; None if all attend to everything.
        has_output_bias: whether attention's output has a bias if `attention_bias` is true.
        has_head_norms: whether each head of queries and of keys is normalized.
        heads_divide_hidden_size: whether transformers requires hidden_size to be a multiple of
            num_attention_heads.
    """

    architecture: str
    model_type: str
    keys: Keys
    sublayers: tuple[SublayerName, ...] = ("attention", "mlp")
    window: Callable[[ConfigValues], int | None] = window_of_all_layers
    has_output_bias: bool = True
    has_head_norms: bool = False
    heads_divide_hidden_size: bool = False

    def __post_init__(self) -> None:
        assert len(set(self.sublayers)) == len(self.sublayers), "a sublayer is there twice"
