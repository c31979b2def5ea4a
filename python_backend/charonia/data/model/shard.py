"""The heads, outputs, token ids and layers of a model that a rank has.

Owns the arithmetic only. Must not know tensors or files: `parameters` uses these numbers to
allocate and to name tensors.

Matrices are split as in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3)::

    q, k, v, gate, up     by outputs: a part has some of the heads, or of the MLP's inner values
    o, down               by inputs, the same ones; the products of the parts are summed
    embedding, head       by token ids
    norms                 not split
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from charonia.data.comm import Place
from charonia.data.model.spec import ModelSpec
from charonia.errors import ConfigError

_PADDED_MULTIPLE = 16


@dataclass(frozen=True)
class Share:
    """A part's share of one axis of a checkpoint's tensor.

    Attributes:
        whole: size of the axis in the checkpoint.
        ranges: of that axis, none empty, in the order of the part's memory.
        size: of the axis in the part's memory; zeros fill it up behind `ranges`.
    """

    whole: int
    ranges: tuple[range, ...]
    size: int

    @classmethod
    def full(cls, size: int) -> "Share":
        """All of an axis."""
        return cls(size, (range(size),), size)

    @property
    def is_padded(self) -> bool:
        """True if there are zeros at the end."""
        return sum(map(len, self.ranges)) < self.size

    def cuts(self) -> Iterator[tuple[slice, slice]]:
        """Pair each slice of the part's memory with the slice of the checkpoint that fills it."""
        start = 0
        for part in self.ranges:
            yield slice(start, start + len(part)), slice(part.start, part.stop)
            start += len(part)


def stage_layers(spec: ModelSpec, place: Place) -> range:
    """The layers of a place's stage.

    All stages have the same number of layers, or the first ones have one more. The last stage does
    not: a step is as slow as its slowest stage, and the last one also computes the head, which in a
    small model costs as much as several layers. The embedding of the first stage is only a look-up.

    Raises:
        ConfigError: there are more stages than layers.
    """
    if place.num_stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size = {place.num_stages} is more than the model's"
            f" {spec.num_layers} layers; accepted are 1 to {spec.num_layers}"
        )
    least, num_longer = divmod(spec.num_layers, place.num_stages)
    first = place.stage * least + min(place.stage, num_longer)
    return range(first, first + least + (place.stage < num_longer))


def query_heads(spec: ModelSpec, place: Place) -> range:
    """The query heads of a part.

    Raises:
        ConfigError: they cannot be split evenly.
    """
    num_heads, num_parts = spec.num_heads, place.num_parts
    if num_heads % num_parts:
        accepted = [str(n) for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ConfigError(
            f"tensor_parallel_size = {num_parts} does not divide the model's {num_heads} attention"
            f" heads; accepted are {', '.join(accepted)}"
        )
    num_local = num_heads // num_parts
    return range(place.part * num_local, (place.part + 1) * num_local)


def local_kv_heads(spec: ModelSpec, place: Place) -> list[int]:
    """The model's KV head of each KV head of a part; it may occur repeatedly.

    With g query heads per KV head in the model, q query heads in a part and c = gcd(g, q), the part
    has one KV head per c query heads:

        model   g = 2     q 0 1│2 3│4 5│6 7│…      12 query heads, 6 KV heads
        parts   q = 3     q 0 1 2║3 4 5║6 7 8║…    4 parts
        so      c = 1     k 0 0 1║1 2 2║3 3 4║…    KV heads of each part

    This is correct because c divides both the part's first query head, part * q, and g. So the c
    query heads from part * q + j * c on begin at a multiple of c and do not cross a multiple of g:
    in the model they share the KV head (part * q + j * c) // g. If g divides q, every KV head
    belongs to one part. If q divides g, every part has one KV head, and some parts have the same.

    Raises:
        ConfigError: the query heads cannot be split evenly.
    """
    heads = query_heads(spec, place)
    group = spec.num_heads // spec.num_kv_heads
    return [head // group for head in heads[:: math.gcd(group, len(heads))]]


def num_local_kv_heads(spec: ModelSpec, place: Place) -> int:
    """The number of KV heads in a part's cache."""
    return len(local_kv_heads(spec, place))


def heads_share(heads: Sequence[int], num_heads: int, head_dim: int) -> Share:
    """Convert heads to the rows of a matrix with `head_dim` rows per head."""
    runs: list[range] = []
    for head in heads:
        if runs and runs[-1].stop == head:
            runs[-1] = range(runs[-1].start, head + 1)
        else:
            runs.append(range(head, head + 1))
    ranges = tuple(range(run.start * head_dim, run.stop * head_dim) for run in runs)
    return Share(num_heads * head_dim, ranges, len(heads) * head_dim)


def intermediate_share(spec: ModelSpec, place: Place) -> Share:
    """The MLP's inner values of a part.

    Padding has no effect: zeros of gate and up give silu(0) · 0 = 0, and down's columns are zeros.
    """
    whole, num_parts = spec.intermediate_size, place.num_parts
    size = -(-whole // num_parts)
    # The CPU kernels need an even number of inputs. A model that is not split is not padded.
    if num_parts > 1 and (whole % num_parts or size % 2):
        size = -(-size // _PADDED_MULTIPLE) * _PADDED_MULTIPLE
    return _consecutive_share(whole, size, place.part)


def vocab_range(spec: ModelSpec, place: Place) -> range:
    """The token ids of a part's rows, in the embedding and in the head.

    All parts have the same number. The last ones may go beyond the vocabulary, or beyond the
    checkpoint's rows: such rows are zeros.
    """
    size = -(-spec.vocab_size // place.num_parts)
    return range(place.part * size, (place.part + 1) * size)


def vocab_share(spec: ModelSpec, place: Place) -> Share:
    """`vocab_range` as a share of the checkpoint's rows."""
    num_stored = spec.num_stored_ids or spec.vocab_size
    size = len(vocab_range(spec, place))
    return _consecutive_share(num_stored, size, place.part, stop=spec.vocab_size)


def _consecutive_share(whole: int, size: int, part: int, *, stop: int | None = None) -> Share:
    """A part's `size` of an axis that is split in order, up to `stop`."""
    taken = range(whole)[:stop][part * size : (part + 1) * size]
    return Share(whole, (taken,) if taken else (), size)
