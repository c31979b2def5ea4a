"""The shape of a small model, for tests of what depends on its heads alone."""

from charonia.data.model.spec import ModelSpec, RopeSpec


def spec_of(head_dim: int) -> ModelSpec:
    """Three layers of four heads of queries and two of keys."""
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        max_position_embeddings=64,
        sliding_window=None,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=1e4),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        is_tied=True,
        dtype="bfloat16",
        eos_token_ids=(),
    )
