"""What distinguishes the families of models.

Owns the record that each family fills in, in a file of its own. Must not know tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from charonia.data.model.config_keys import Keys
from charonia.data.model.config_values import ConfigValues

SublayerName = Literal["attention", "mlp"]


def window_of_all_layers(config: ConfigValues) -> int | None:
    """The sliding window where all layers have the same, None where there is none."""
    return None if config.get("sliding_window") is None else config.integer("sliding_window")


@dataclass(frozen=True)
class Family:
    """A family of models: what its config.json may say, and what that does not say.

    Attributes:
        architecture: what config.json calls it.
        model_type: what transformers chooses the model by.
        keys: of config.json.
        sublayers: of each layer, in their order; each at most once, as the names of its tensors and
            the layer's KV cache belong to one of a kind.
        window: the smallest sliding window of its layers, None where all attend to everything.
        has_output_bias: whether attention's output has a bias where `attention_bias` is true.
        has_head_norms: whether each head of queries and of keys is normalized.
        heads_divide_hidden_size: whether transformers refuses a hidden_size that is no multiple of
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
