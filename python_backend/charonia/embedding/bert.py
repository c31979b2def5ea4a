"""A BERT that computes vectors of texts (Devlin et al. 2019).

Pooling is as in Reimers and Gurevych 2019.

Owns reading the checkpoint and the pass through the model, of one text at a time, in float32.
Must not know what vectors are for. The work is small enough for numpy on one core, and torch must
not be loaded in this process.

A checkpoint is a directory as sentence-transformers writes it: config.json of a BERT,
model.safetensors in float32 or float16, tokenizer.json, and optionally modules.json,
1_Pooling/config.json and sentence_bert_config.json.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from charonia.checkpoint_files import read_json_object
from charonia.errors import CheckpointError, shown

Vector = npt.NDArray[np.float32]
_MODULES = ("Transformer", "Pooling", "Normalize")
_POOLINGS = ("pooling_mode_mean_tokens", "pooling_mode_cls_token")


class _Linear(NamedTuple):
    weight: Vector  # [inputs, outputs]
    bias: Vector  # [outputs]

    def __call__(self, x: Vector) -> Vector:
        y: Vector = x @ self.weight + self.bias
        return y


class _Norm(NamedTuple):
    weight: Vector  # [dim]
    bias: Vector  # [dim]
    eps: float

    def __call__(self, x: Vector) -> Vector:
        x = x - x.mean(axis=-1, keepdims=True)
        variance = (x * x).mean(axis=-1, keepdims=True)
        y: Vector = x / np.sqrt(variance + np.float32(self.eps)) * self.weight + self.bias
        return y


class _Layer(NamedTuple):
    query: _Linear
    key: _Linear
    value: _Linear
    attended: _Linear
    attended_norm: _Norm
    wide: _Linear
    narrow: _Linear
    norm: _Norm

    def __call__(self, x: Vector, num_heads: int) -> Vector:  # [tokens, dim]
        query, key, value = (
            _heads(one(x), num_heads) for one in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(0, 2, 1) / np.float32(np.sqrt(query.shape[-1]))
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores)
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = (weights @ value).transpose(1, 0, 2).reshape(x.shape)
        x = self.attended_norm(x + self.attended(mixed))
        return self.norm(x + self.narrow(_gelu(self.wide(x))))


class Encoder:
    """Computes vectors of texts.

    Args:
        tensors: of the checkpoint, by name.

    Attributes:
        num_dims: dimensions of a vector. max_tokens: of a text, including its start and end tokens.

    Raises:
        CheckpointError: the number of heads does not divide that of dimensions.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tensors: Mapping[str, Vector],
        *,
        num_layers: int,
        num_heads: int,
        eps: float,
        max_tokens: int,
        takes_mean: bool,
    ) -> None:
        def norm(name: str) -> _Norm:
            return _Norm(tensors[f"{name}.weight"], tensors[f"{name}.bias"], eps)

        def linear(name: str) -> _Linear:
            weight = np.ascontiguousarray(tensors[f"{name}.weight"].T)
            return _Linear(weight, tensors[f"{name}.bias"])

        self._tokenizer = tokenizer
        unknown = getattr(tokenizer.model, "unk_token", None)
        self._unknown_id = None if unknown is None else tokenizer.token_to_id(unknown)
        self._num_heads = num_heads
        self._takes_mean = takes_mean
        self._words = tensors["embeddings.word_embeddings.weight"]
        types = tensors["embeddings.token_type_embeddings.weight"]
        self._places = tensors["embeddings.position_embeddings.weight"] + types[0]
        self._norm = norm("embeddings.LayerNorm")
        self._layers = [
            _Layer(
                query=linear(f"{layer}.attention.self.query"),
                key=linear(f"{layer}.attention.self.key"),
                value=linear(f"{layer}.attention.self.value"),
                attended=linear(f"{layer}.attention.output.dense"),
                attended_norm=norm(f"{layer}.attention.output.LayerNorm"),
                wide=linear(f"{layer}.intermediate.dense"),
                narrow=linear(f"{layer}.output.dense"),
                norm=norm(f"{layer}.output.LayerNorm"),
            )
            for layer in (f"encoder.layer.{number}" for number in range(num_layers))
        ]
        self.num_dims = int(self._words.shape[1])
        if num_heads < 1 or self.num_dims % num_heads:
            raise CheckpointError(
                f"the embedding model's num_attention_heads must divide its {self.num_dims}"
                f" dimensions, but is {num_heads}"
            )
        self.max_tokens = min(max_tokens, len(self._places))

    @classmethod
    def from_dir(cls, path: Path) -> "Encoder":
        """Read a checkpoint.

        Raises:
            CheckpointError: files are missing or damaged, or it is of another kind.
        """
        config = read_json_object(path / "config.json")
        _check_value("model_type", config.get("model_type"), ("bert",))
        _check_value("hidden_act", config.get("hidden_act", "gelu"), ("gelu",))
        position = config.get("position_embedding_type", "absolute")
        _check_value("position_embedding_type", position, ("absolute",))
        _check_modules(path)
        sentence = read_json_object(path / "sentence_bert_config.json", is_optional=True)
        try:
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            tensors = _read_tensors(path / "model.safetensors")
            return cls(
                tokenizer,
                tensors,
                num_layers=int(config["num_hidden_layers"]),
                num_heads=int(config["num_attention_heads"]),
                eps=float(config.get("layer_norm_eps", 1e-12)),
                max_tokens=int(sentence.get("max_seq_length") or 2**31),
                takes_mean=_takes_mean(path),
            )
        except KeyError as error:
            raise CheckpointError(f"the embedding model has no {error.args[0]}") from None
        except CheckpointError:
            raise
        except Exception as error:  # of tokenizers, whose errors have no type
            raise CheckpointError(f"the embedding model cannot be read: {error}") from None

    def encode(self, text: str) -> Vector | None:
        """Return the vector of a text, of length 1.

        None if the text is longer than the model's context, or has a word that the model does not
        know: all such words are the same to it, or it has no vector of them.
        """
        ids = self._tokenizer.encode(text).ids
        if not 0 < len(ids) <= self.max_tokens or self._unknown_id in ids:
            return None
        if max(ids) >= len(self._words):
            return None
        x = self._norm(self._words[ids] + self._places[: len(ids)])
        for layer in self._layers:
            x = layer(x, self._num_heads)
        pooled: Vector = x.mean(axis=0) if self._takes_mean else x[0]
        length = float(np.sqrt(np.dot(pooled, pooled)))
        return None if length == 0.0 else (pooled / np.float32(length)).astype(np.float32)


def _heads(x: Vector, num_heads: int) -> Vector:
    """Reshape [tokens, dim] to [heads, tokens, dim of a head]."""
    return x.reshape(len(x), num_heads, -1).transpose(1, 0, 2)


def _gelu(x: Vector) -> Vector:
    """x Φ(x), with erf after Abramowitz and Stegun, 7.1.26: within 1.5e-7."""
    z = np.abs(x) * np.float32(np.sqrt(0.5))
    t = 1.0 / (1.0 + np.float32(0.3275911) * z)
    terms = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    polynomial = np.zeros_like(t)
    for term in terms:
        polynomial = (polynomial + np.float32(term)) * t
    erf = np.sign(x) * (1.0 - polynomial * np.exp(-z * z))
    half: Vector = np.float32(0.5) * x * (1.0 + erf)
    return half


def _read_tensors(path: Path) -> dict[str, Vector]:
    """Read the tensors. Raises CheckpointError."""
    try:
        tensors = load_file(path)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror or error}") from None
    except (SafetensorError, TypeError, KeyError) as error:  # also for dtypes that numpy lacks
        raise CheckpointError(f"{path.name} cannot be read by numpy: {error}") from None
    floats = {name: one for name, one in tensors.items() if one.dtype.kind == "f"}
    return {name.removeprefix("bert."): one.astype(np.float32) for name, one in floats.items()}


def _check_modules(path: Path) -> None:
    """Check that no unknown module follows the pooling. Raises CheckpointError."""
    file = path / "modules.json"
    if not file.exists():
        return
    try:
        kinds = [str(one["type"]).rpartition(".")[2] for one in json.loads(file.read_bytes())]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"modules.json of the embedding model is wrong: {error}") from None
    for kind in kinds:
        _check_value("a module's type", kind, _MODULES)


def _takes_mean(path: Path) -> bool:
    """Return whether vectors are the mean of all tokens, instead of the first token.

    Raises:
        CheckpointError: the pooling is of another kind.
    """
    config = read_json_object(path / "1_Pooling" / "config.json", is_optional=True)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode") and value]
    if modes and modes not in ([_POOLINGS[0]], [_POOLINGS[1]]):
        _check_value("1_Pooling", ", ".join(modes), _POOLINGS)
    return modes != [_POOLINGS[1]]


def _check_value(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise CheckpointError(
            f"the embedding model's {name} must be {' or '.join(accepted)}, but is {shown(value)}"
        )
