"""How a head's key or value is kept in the KV cache: as it is, or in fewer bits.

Owns the table of formats, how numbers are rounded and how they are read back. Must not know
layers, blocks or which operations lay pages out.

A quantized head is codes, and a scale for all of them or for each group; a number is its code times
its scale. Scales are bfloat16, which has the range of float32: whatever is finite can be stored.
They are dynamic, i.e. each is made of the numbers that it is for, when these are written, so no
calibration is needed and no token changes what is kept of another one. `ComposedOps` keep a head in
one piece::

    int8, fp8   [codes: head_dim bytes] [scale: 2 bytes]                66 bytes of 64 numbers
    int4        [codes: head_dim / 2 bytes] [scales: 2 bytes of 32]     36 bytes
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from charonia.errors import ConfigError

IN_PLACE_OF_INFINITY = 6e4
"""What replaces infinities in the pages; finite numbers are stored as they are.

An infinity there would spoil other requests: times their zero weight it is no number. The request
that computed it has lost its meaning already, so any number does; this one is within float16's
range of 65,504, and leaves the sums that it goes into finite."""
_LEAST = 1e-30
"""A group whose numbers are all smaller is stored as zeros: its scale would have no precision."""
SCALE_BYTES = 2


class KVFormat(Protocol):
    """A way to keep a head's numbers.

    Attributes:
        storage: element type of the pages' tensors; it tells formats apart.
        group: numbers that share a scale; None is all of a head. Where there are no scales it means
            nothing.
    """

    @property
    def storage(self) -> torch.dtype: ...

    @property
    def group(self) -> int | None: ...

    def width(self, head_dim: int) -> int:
        """Elements of `storage` that a head takes."""
        ...

    def encode(self, x: Tensor) -> Tensor:
        """Make numbers finite and store them: `x` [..., head_dim] to [..., width]."""
        ...

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Read numbers back: [..., width] to [..., head_dim], finite in `dtype`."""
        ...


@dataclass(frozen=True)
class Unquantized:
    """Implements `KVFormat`: numbers as they are."""

    storage: torch.dtype
    group: int | None = None

    def width(self, head_dim: int) -> int:
        return head_dim

    def encode(self, x: Tensor) -> Tensor:
        return _finite(x)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        return stored.to(dtype)


@dataclass(frozen=True)
class Quantized:
    """Implements `KVFormat`: codes and scales.

    Attributes:
        tops: what a group's number of the largest magnitude is scaled to, and the others with it.
            Of several the one is taken that leaves the least sum of squared errors; where one is
            negative, so is the scale of a group whose largest number is positive.
        rounded: of scaled numbers, float32, the nearest that have a code.
        pack: numbers that have a code, [..., groups, group], to bytes, [..., bytes].
        unpack: bytes to float32, [..., numbers].
    """

    storage: torch.dtype
    group: int | None
    bits: int
    tops: tuple[float, ...]
    rounded: Callable[[Tensor], Tensor]
    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]

    def width(self, head_dim: int) -> int:
        return head_dim * self.bits // 8 + head_dim // (self.group or head_dim) * SCALE_BYTES

    def encode(self, x: Tensor) -> Tensor:
        wide = _finite(x.float())
        groups = _in_groups(wide, self.group or x.shape[-1])
        most, least = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
        largest = torch.where(most >= -least, most, least)
        largest = torch.where(largest.abs() < _LEAST, 0.0, largest)
        scales, numbers, error = self._scaled(groups, largest, self.tops[0])
        for top in self.tops[1:]:
            other = self._scaled(groups, largest, top)
            is_better = other[2] < error
            scales = torch.where(is_better, other[0], scales)
            numbers = torch.where(is_better, other[1], numbers)
            error = torch.where(is_better, other[2], error)
        as_bytes = scales.flatten(-2).to(torch.bfloat16).view(torch.uint8)
        return torch.cat((self.pack(numbers), as_bytes), -1).view(self.storage)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        codes, scales = self._split(stored.view(torch.uint8))
        numbers = self.unpack(codes)
        groups = _in_groups(numbers, numbers.shape[-1] // scales.shape[-1])
        most = torch.finfo(dtype).max  # a scale is rounded, so the largest number may pass it
        wide: Tensor = (groups * scales[..., None]).flatten(-2)
        return wide.clamp_(-most, most).to(dtype)

    def _scaled(self, groups: Tensor, largest: Tensor, top: float) -> tuple[Tensor, Tensor, Tensor]:
        """Scales [..., groups, 1], the scaled numbers that have a code, and squared errors."""
        scales = (largest / top).to(torch.bfloat16).float()
        divisors = torch.where(scales == 0, 1.0, scales)
        scaled = torch.where(scales == 0, 0.0, groups / divisors)
        numbers = self.rounded(scaled)
        return scales, numbers, _sum_of_squares((numbers - scaled) * scales)

    def _split(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [..., bytes] and scales [..., groups] of bytes [..., width]."""
        width = stored.shape[-1]
        # A group of numbers, or for want of groups all, takes codes and then a scale.
        num_scales = width // (self.group * self.bits // 8 + SCALE_BYTES) if self.group else 1
        codes, scales = stored.tensor_split([width - num_scales * SCALE_BYTES], -1)
        return codes, scales.contiguous().view(torch.bfloat16).float()


def _in_groups(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, size)


def _sum_of_squares(x: Tensor) -> Tensor:
    """Over the last dimension, in float64, which squares are exact in, and in one order.

    The second half is added to the first until one number is left. So whoever sums up errors
    like that finds the same scale to be the best.
    """
    size = 1 << (x.shape[-1] - 1).bit_length()
    total = F.pad(x.double().square(), (0, size - x.shape[-1]))
    while total.shape[-1] > 1:
        first, second = total.chunk(2, -1)
        total = first + second
    return total


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=IN_PLACE_OF_INFINITY, neginf=-IN_PLACE_OF_INFINITY)


def _whole(least: int, most: int) -> Callable[[Tensor], Tensor]:
    return lambda scaled: torch.round(scaled).clamp_(least, most)


def _to_e4m3(scaled: Tensor) -> Tensor:
    return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def _pack_nibbles(numbers: Tensor) -> Tensor:
    """The two halves of a group share bytes; a nibble is the number plus 8."""
    low, high = (numbers + 8).to(torch.uint8).chunk(2, -1)
    return (low | high << 4).flatten(-2)


def _unpack_nibbles(codes: Tensor) -> Tensor:
    groups = _in_groups(codes, 16)
    return torch.cat((groups & 15, groups >> 4), -1).flatten(-2).float() - 8


_INT8 = Quantized(
    torch.int8,
    group=None,
    bits=8,
    tops=(127.0,),
    rounded=_whole(-127, 127),
    pack=lambda numbers: numbers.to(torch.int8).view(torch.uint8).flatten(-2),
    unpack=lambda codes: codes.view(torch.int8).float(),
)
# Where in a binade the largest number lies decides how finely the others are rounded.
_FP8 = Quantized(
    torch.float8_e4m3fn,
    group=None,
    bits=8,
    tops=tuple(224 * 2 ** (place / 8) for place in range(8)),
    rounded=lambda scaled: _to_e4m3(scaled).float(),
    pack=lambda numbers: _to_e4m3(numbers).view(torch.uint8).flatten(-2),
    unpack=lambda codes: codes.view(torch.float8_e4m3fn).float(),
)
# Of a group's 16 codes the outermost, -8, has no opposite, so the largest number gets it, or one
# between codes, which may leave all of them with less error.
_INT4 = Quantized(
    torch.uint8,
    group=32,
    bits=4,
    tops=tuple(-5.5 - place / 2 for place in range(8)),
    rounded=_whole(-8, 7),
    pack=_pack_nibbles,
    unpack=_unpack_nibbles,
)

FORMATS: dict[str, KVFormat] = {
    "int8": _INT8,
    "fp8": _FP8,
    "int4": _INT4,
    **{
        str(dtype).removeprefix("torch."): Unquantized(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
}
"""By `KVLayout.dtype`."""
_BY_STORAGE = {kv_format.storage: kv_format for kv_format in FORMATS.values()}


def format_of(pages: Tensor) -> KVFormat:
    """The format of what lies in these pages."""
    return _BY_STORAGE[pages.dtype]


def format_name(kv_cache_dtype: str, dtype: torch.dtype, head_dim: int) -> str:
    """Of a setting, for a model that computes in `dtype`, the key of `FORMATS`.

    Raises:
        ConfigError: heads of this size cannot be kept so.
    """
    if kv_cache_dtype == "auto":
        return str(dtype).removeprefix("torch.")
    name = kv_cache_dtype.removesuffix("_e4m3")  # as vLLM says it
    group = FORMATS[name].group
    if group and head_dim % group:
        raise ConfigError(
            f"kv_cache_dtype = {kv_cache_dtype!r} has a scale for every {group} numbers of a head,"
            f" and this model's have {head_dim}; 'int8' and 'fp8' take heads of any size"
        )
    return name
