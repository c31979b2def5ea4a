"""Which heads, outputs, token ids and layers of a model a rank has.

Owns the arithmetic alone. Must not know tensors or files: `parameters` allocates and names what
these numbers say.

Matrices are cut as in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3)::

    q, k, v, gate, up     by outputs: a part has some of the heads, some of the MLP's inner values
    o, down               by inputs, the same ones: the parts' products are to be added up
    embedding, head       by token ids
    norms                 not at all
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
    """What a part has of one axis of a checkpoint's tensor.

    Attributes:
        whole: size of the axis in the checkpoint.
        ranges: of that axis, none empty, one after the other as they lie in the part's memory.
        size: of the axis in the part's memory; what `ranges` leave of it are zeros at its end.
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
        """Whether there are zeros at the end."""
        return sum(map(len, self.ranges)) < self.size

    def cuts(self) -> Iterator[tuple[slice, slice]]:
        """Pair each slice of the part's memory with that of the checkpoint which fills it."""
        start = 0
        for part in self.ranges:
            yield slice(start, start + len(part)), slice(part.start, part.stop)
            start += len(part)


def stage_layers(spec: ModelSpec, place: Place) -> range:
    """Say which layers the place's stage has.

    As many in every stage, or one more in the first ones. Not in the last: a step is as slow as
    its slowest stage, and the last one multiplies by the head too, which for a small model is the
    work of several layers; the first one's embedding is only a look-up.

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
    """Say which query heads the part has.

    Raises:
        ConfigError: they cannot be shared out evenly.
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
    """Say which KV head of the model each KV head of the part is; one may be there repeatedly.

    With g query heads to a KV head in the model, q query heads in a part and c = gcd(g, q), the
    part has a KV head for every c query heads:

        model   g = 2     q 0 1│2 3│4 5│6 7│…      12 query heads, 6 KV heads
        parts   q = 3     q 0 1 2║3 4 5║6 7 8║…    4 parts
        so      c = 1     k 0 0 1║1 2 2║3 3 4║…    KV heads of each part

    That is right: c divides both the part's first query head, part * q, and g, so the c query
    heads from part * q + j * c on begin at a multiple of c and do not cross one of g: in the model
    they have one KV head, (part * q + j * c) // g. Where g divides q this gives every KV head to
    one part, and where q divides g every part has one KV head, some parts the same.

    Raises:
        ConfigError: the query heads cannot be shared out evenly.
    """
    heads = query_heads(spec, place)
    group = spec.num_heads // spec.num_kv_heads
    return [head // group for head in heads[:: math.gcd(group, len(heads))]]


def num_local_kv_heads(spec: ModelSpec, place: Place) -> int:
    """Count the KV heads that the part's cache holds."""
    return len(local_kv_heads(spec, place))


def heads_share(heads: Sequence[int], num_heads: int, head_dim: int) -> Share:
    """Turn heads into the rows of a matrix that has `head_dim` of them for each."""
    runs: list[range] = []
    for head in heads:
        if runs and runs[-1].stop == head:
            runs[-1] = range(runs[-1].start, head + 1)
        else:
            runs.append(range(head, head + 1))
    ranges = tuple(range(run.start * head_dim, run.stop * head_dim) for run in runs)
    return Share(num_heads * head_dim, ranges, len(heads) * head_dim)


def intermediate_share(spec: ModelSpec, place: Place) -> Share:
    """Say which of the MLP's inner values the part has.

    Padding adds nothing: zeros of gate and up give silu(0) · 0 = 0, and down's columns are zeros.
    """
    whole, num_parts = spec.intermediate_size, place.num_parts
    size = -(-whole // num_parts)
    # The CPU kernels take matrices with an even number of inputs alone; the model's own size
    # stays as it is.
    if num_parts > 1 and (whole % num_parts or size % 2):
        size = -(-size // _PADDED_MULTIPLE) * _PADDED_MULTIPLE
    return _consecutive_share(whole, size, place.part)


def vocab_range(spec: ModelSpec, place: Place) -> range:
    """Say which token ids the part has rows for, in the embedding and in the head.

    Every part has as many. The last ones may go beyond the vocabulary, or beyond what the
    checkpoint has of it: such rows are zeros.
    """
    size = -(-spec.vocab_size // place.num_parts)
    return range(place.part * size, (place.part + 1) * size)


def vocab_share(spec: ModelSpec, place: Place) -> Share:
    """`vocab_range` as a share of the checkpoint's rows."""
    num_stored = spec.num_stored_ids or spec.vocab_size
    size = len(vocab_range(spec, place))
    return _consecutive_share(num_stored, size, place.part, stop=spec.vocab_size)


def _consecutive_share(whole: int, size: int, part: int, *, stop: int | None = None) -> Share:
    """The part's `size` of an axis that is shared out in order, up to `stop`."""
    taken = range(whole)[:stop][part * size : (part + 1) * size]
    return Share(whole, (taken,) if taken else (), size)
