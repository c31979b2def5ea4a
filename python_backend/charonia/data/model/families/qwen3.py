"""Qwen3: a Qwen2 that normalizes each head of queries and of keys, and mostly has no biases."""

from charonia.data.model.config_keys import Fixed, Keys
from charonia.data.model.families.family import Family
from charonia.data.model.families.qwen2 import HONOURED, NULLABLE, window_of_some_layers

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    keys=Keys.of(
        {**HONOURED, "head_dim": 128, "attention_bias": False},
        nullable=NULLABLE,
        fixed={"mlp_bias": Fixed((False,))},
    ),
    window=window_of_some_layers,
    has_head_norms=True,
)
