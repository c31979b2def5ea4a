"""Llama, all versions from the first, and models that use its architecture."""

from charonia.data.model.config_keys import Fixed, Keys
from charonia.data.model.families.family import Family

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    keys=Keys.of(
        {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": None,
            "head_dim": None,
            "max_position_embeddings": 2048,
            # Not a key of the class, but the cache of `generate` reads it.
            "sliding_window": None,
            "attention_bias": False,
            "mlp_bias": False,
        },
        nullable="num_key_value_heads head_dim sliding_window",
        fixed={"layer_types": Fixed((None,), "all layers have full attention")},
    ),
    heads_divide_hidden_size=True,
)
