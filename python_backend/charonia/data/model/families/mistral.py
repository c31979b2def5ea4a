"""Mistral: a Llama without biases, whose layers may have a sliding window."""

from charonia.data.model.config_keys import Fixed, Keys
from charonia.data.model.families.family import Family

MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    keys=Keys.of(
        {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": None,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
        },
        nullable="head_dim sliding_window",
        fixed={
            "attention_bias": Fixed((False,)),
            "mlp_bias": Fixed((False,)),
            "layer_types": Fixed((), "with it this is a Ministral model"),
        },
    ),
)
