"""A model that is shared out among ranks: their parts together are the whole model."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from charonia.data.comm import Place
from charonia.data.model.loader import load_weights
from charonia.data.model.parameters import Parameters
from charonia.data.model.shard import vocab_range
from charonia.data.model.spec import ModelSpec
from charonia.data.ops.base import AttentionWeights, MatrixWeights, MlpWeights, NormWeights

Checkpoint = Callable[..., Path]
HIDDEN_SIZE = 96
INTERMEDIATE_SIZE = 100  # even in two parts, odd in four, uneven in three
VOCAB_SIZE = 385

architectures = pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("MistralForCausalLM", {}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"attention_bias": True}),
    ],
    ids=["llama", "mistral", "qwen2", "qwen3"],
)
splits = pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_parts"),
    [
        (4, 2, 2),
        (4, 4, 4),
        pytest.param(4, 2, 4, id="fewer KV heads than parts"),
        pytest.param(4, 1, 2, id="one KV head"),
        pytest.param(6, 2, 3, id="a part's heads cross two groups"),
        (6, 6, 3),
        pytest.param(12, 6, 4, id="one and a half groups in a part"),
        pytest.param(4, 2, 1, id="one part"),
    ],
)


@pytest.fixture(autouse=True)
def _spoiled_memory() -> Iterator[None]:
    """Have torch fill memory that it allocates with NaN, so that what nobody fills is noticed."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def load(model_dir: Path, place: Place) -> Parameters:
    """Load a place's part, in float64."""
    spec = ModelSpec.from_dir(model_dir)
    parameters = Parameters(spec, torch.float64, torch.device("cpu"), place)
    tensors = parameters.checkpoint_tensors()
    load_weights(model_dir, tensors, is_tied=spec.is_tied, log=lambda line: None)
    return parameters


@pytest.fixture
def shared_out(checkpoint: Checkpoint) -> Callable[..., tuple[ModelSpec, "Stored", Any]]:
    """Make a checkpoint and load all its parts: what it is, what it holds, and the parts."""

    def make(
        architecture: str, settings: dict[str, Any], num_heads: int, num_kv_heads: int, parts: int
    ) -> tuple[ModelSpec, Stored, list[Parameters]]:
        model_dir = checkpoint(
            architecture,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=INTERMEDIATE_SIZE,
            vocab_size=VOCAB_SIZE,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            **settings,
        )
        spec = ModelSpec.from_dir(model_dir)
        return (
            spec,
            Stored(model_dir),
            [load(model_dir, Place(part, parts)) for part in range(parts)],
        )

    return make


class Stored:
    """The tensors of a checkpoint, in float64."""

    def __init__(self, model_dir: Path) -> None:
        self._tensors = load_file(model_dir / "model.safetensors")

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].double()

    def matrix(self, layer: int, name: str) -> tuple[Tensor, Tensor | None]:
        """A matrix and its bias, if it has one."""
        prefix = f"model.layers.{layer}.{name}."
        bias = self._tensors.get(f"{prefix}bias")
        return self[f"{prefix}weight"], None if bias is None else bias.double()

    def matrices(self, layer: int, *names: str) -> MatrixWeights:
        """Some matrices, one below the other."""
        weights, biases = zip(*(self.matrix(layer, name) for name in names), strict=True)
        return MatrixWeights(torch.cat(weights), None if biases[0] is None else torch.cat(biases))


def attention_of(part: Parameters, index: int) -> AttentionWeights:
    """The attention of a layer of the stage."""
    attention, _ = part.layers[index]
    return attention.weights


def mlp_of(part: Parameters, index: int) -> MlpWeights:
    """The MLP of a layer of the stage."""
    _, mlp = part.layers[index]
    return mlp.weights


def assert_padded(joined: Tensor, whole: Tensor, dim: int = 0) -> None:
    """Assert that it is the whole and then zeros."""
    size = whole.shape[dim]
    assert torch.equal(joined.narrow(dim, 0, size), whole)
    assert not joined.narrow(dim, size, joined.shape[dim] - size).any()


def split_qkv(weights: AttentionWeights, of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take queries', keys' and values' rows apart, as [heads, head_dim, ...]."""
    counts = [weights.num_heads, weights.num_kv_heads, weights.num_kv_heads]
    q, k, v = of.unflatten(0, (-1, weights.head_dim)).split(counts)
    return q, k, v


@architectures
@splits
def test_the_heads_of_all_parts_are_the_models(
    shared_out: Callable[..., Any],
    architecture: str,
    settings: dict[str, Any],
    num_heads: int,
    num_kv_heads: int,
    num_parts: int,
) -> None:
    spec, stored, parts = shared_out(architecture, settings, num_heads, num_kv_heads, num_parts)
    for index in range(spec.num_layers):
        layers = [attention_of(part, index) for part in parts]
        for is_bias in [False, True][: 1 + spec.qkv_bias]:
            q, k, v = [], [], []
            for attention in layers:
                own = attention.qkv.bias if is_bias else attention.qkv.weight
                own_q, own_k, own_v = split_qkv(attention, own)
                # Every query head with the keys and values that it attends to.
                group = attention.num_heads // attention.num_kv_heads
                q.append(own_q)
                k.append(own_k.repeat_interleave(group, 0))
                v.append(own_v.repeat_interleave(group, 0))
            group = num_heads // num_kv_heads
            for name, joined, repeats in (("q", q, 1), ("k", k, group), ("v", v, group)):
                whole = stored.matrix(index, f"self_attn.{name}_proj")[is_bias]
                heads = whole.unflatten(0, (-1, spec.head_dim)).repeat_interleave(repeats, 0)
                assert torch.equal(torch.cat(joined), heads)
        weight, bias = stored.matrix(index, "self_attn.o_proj")
        assert torch.equal(torch.cat([layer.output.weight for layer in layers], 1), weight)
        assert_bias_is_added_once([layer.output for layer in layers], bias)


@architectures
@splits
def test_the_mlps_of_all_parts_are_the_models_and_zeros(
    shared_out: Callable[..., Any],
    architecture: str,
    settings: dict[str, Any],
    num_heads: int,
    num_kv_heads: int,
    num_parts: int,
) -> None:
    spec, stored, parts = shared_out(architecture, settings, num_heads, num_kv_heads, num_parts)
    for index in range(spec.num_layers):
        layers = [mlp_of(part, index) for part in parts]
        for is_bias in [False, True][: 1 + spec.mlp_bias]:
            own = [mlp.gate_up.bias if is_bias else mlp.gate_up.weight for mlp in layers]
            halves = zip(*(one.chunk(2) for one in own), strict=True)
            for name, joined in zip(("gate", "up"), halves, strict=True):
                assert_padded(torch.cat(joined), stored.matrix(index, f"mlp.{name}_proj")[is_bias])
        weight, bias = stored.matrix(index, "mlp.down_proj")
        assert_padded(torch.cat([layer.down.weight for layer in layers], 1), weight, 1)
        assert_bias_is_added_once([layer.down for layer in layers], bias)


def assert_bias_is_added_once(matrices: list[MatrixWeights], bias: Tensor | None) -> None:
    first, *others = (matrix.bias for matrix in matrices)
    assert others == [None] * len(others)
    assert first is None if bias is None else torch.equal(first, bias)


@architectures
@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_the_vocabularies_of_all_parts_are_the_models_and_zeros(
    shared_out: Callable[..., Any],
    architecture: str,
    settings: dict[str, Any],
    is_tied: bool,
    num_parts: int,
) -> None:
    settings = {**settings, "tie_word_embeddings": is_tied}
    spec, stored, parts = shared_out(architecture, settings, 4, 2, num_parts)
    for place, part in enumerate(parts):
        ids = vocab_range(spec, Place(place, num_parts))
        assert part.embedding.shape == part.head.shape == (len(ids), HIDDEN_SIZE)
        assert (part.head is part.embedding) == is_tied
        own = ids[: max(VOCAB_SIZE - ids.start, 0)]
        assert_padded(part.embedding, stored["model.embed_tokens.weight"][own.start : own.stop])
    assert_padded(
        torch.cat([part.embedding for part in parts]), stored["model.embed_tokens.weight"]
    )
    if not is_tied:
        assert_padded(torch.cat([part.head for part in parts]), stored["lm_head.weight"])


@architectures
def test_every_part_has_all_norms(
    shared_out: Callable[..., Any], architecture: str, settings: dict[str, Any]
) -> None:
    spec, stored, parts = shared_out(architecture, settings, 4, 2, 2)
    for part in parts:
        assert torch.equal(part.norm.weight, stored["model.norm.weight"])
        for index in range(spec.num_layers):
            attention = attention_of(part, index)
            norms = {
                "input_layernorm": attention.norm,
                "post_attention_layernorm": mlp_of(part, index).norm,
            }
            if spec.qk_norm:
                names = ("self_attn.q_norm", "self_attn.k_norm")
                norms |= dict(zip(names, attention.head_norms, strict=True))
            assert (attention.head_norms is not None) == spec.qk_norm
            for name, norm in norms.items():
                assert torch.equal(norm.weight, stored[f"model.layers.{index}.{name}.weight"])


def normalized(x: Tensor, norm: NormWeights) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight


def attention_output(x: Tensor, weights: AttentionWeights) -> Tensor:
    """Causal attention over x [tokens, hidden] and its output, without rotation."""
    qkv = linear(normalized(x, weights.norm), weights.qkv.weight, weights.qkv.bias)
    q, k, v = (part.transpose(1, 2) for part in split_qkv(weights, qkv.T))
    if weights.head_norms is not None:
        q, k = (normalized(y, norm) for y, norm in zip((q, k), weights.head_norms, strict=True))
    group = weights.num_heads // weights.num_kv_heads
    k, v = (y.repeat_interleave(group, 0) for y in (k, v))
    heads = scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear(heads.transpose(0, 1).flatten(1), weights.output.weight, weights.output.bias)


def mlp_output(x: Tensor, weights: MlpWeights) -> Tensor:
    gate, up = linear(
        normalized(x, weights.norm), weights.gate_up.weight, weights.gate_up.bias
    ).chunk(2, -1)
    return linear(silu(gate) * up, weights.down.weight, weights.down.bias)


def whole_layer(spec: ModelSpec, stored: Stored, part: Parameters, index: int) -> Any:
    """A layer's sublayers with the matrices of the checkpoint; norms are every part's."""
    attention = AttentionWeights(
        norm=attention_of(part, index).norm,
        qkv=stored.matrices(index, *(f"self_attn.{name}_proj" for name in "qkv")),
        output=stored.matrices(index, "self_attn.o_proj"),
        head_norms=attention_of(part, index).head_norms,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
    )
    mlp = MlpWeights(
        norm=mlp_of(part, index).norm,
        gate_up=stored.matrices(index, "mlp.gate_proj", "mlp.up_proj"),
        down=stored.matrices(index, "mlp.down_proj"),
    )
    return attention, mlp


@architectures
@splits
def test_the_parts_outputs_add_up_to_the_models(
    shared_out: Callable[..., Any],
    architecture: str,
    settings: dict[str, Any],
    num_heads: int,
    num_kv_heads: int,
    num_parts: int,
) -> None:
    spec, stored, parts = shared_out(architecture, settings, num_heads, num_kv_heads, num_parts)
    x = torch.randn(7, HIDDEN_SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for index in range(spec.num_layers):
        attention, mlp = whole_layer(spec, stored, parts[0], index)
        joined = sum(attention_output(x, attention_of(part, index)) for part in parts)
        torch.testing.assert_close(joined, attention_output(x, attention))
        joined = sum(mlp_output(x, mlp_of(part, index)) for part in parts)
        torch.testing.assert_close(joined, mlp_output(x, mlp))


def test_a_part_for_which_nothing_is_left_is_zeros(checkpoint: Checkpoint) -> None:
    model_dir = checkpoint("LlamaForCausalLM", num_attention_heads=8, intermediate_size=33)
    last = load(model_dir, Place(part=3, num_parts=4))
    for index in range(len(last.layers)):
        assert not mlp_of(last, index).gate_up.weight.any()
        assert not mlp_of(last, index).down.weight.any()


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_have_every_layer_once(
    checkpoint: Checkpoint, num_stages: int, is_tied: bool
) -> None:
    model_dir = checkpoint("Qwen3ForCausalLM", num_hidden_layers=5, tie_word_embeddings=is_tied)
    stored = Stored(model_dir)
    next_layer = 0
    for stage in range(num_stages):
        place = Place(stage=stage, num_stages=num_stages)
        own = load(model_dir, place)
        assert own.first_layer == next_layer
        for index in range(len(own.layers)):
            weight, _ = stored.matrix(next_layer, "mlp.down_proj")
            assert torch.equal(mlp_of(own, index).down.weight, weight)
            next_layer += 1
        is_last = stage == num_stages - 1
        assert (own.embedding is not None) == (stage == 0 or (is_last and is_tied))
        assert (own.head is not None) == (own.norm is not None) == is_last
        if is_last:
            name = "model.embed_tokens" if is_tied else "lm_head"
            assert torch.equal(own.head, stored[f"{name}.weight"])
    assert next_layer == 5
