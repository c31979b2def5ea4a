"""Formats of a head's key or value in the KV cache: unquantized, or in fewer bits.

Owns the table of formats, rounding numbers and reading them back. Must not know layers, blocks, or
which operations define the layout of pages.

A quantized head has codes, and a scale for all codes or for each group of them. A number is its
code times its scale. Scales are bfloat16, which has the range of float32, so all finite numbers can
be stored. Scales are dynamic: each is computed from its numbers when they are written. So no
calibration is needed, and a token does not change the stored data of another one. `ComposedOps`
store a head in one piece::

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
"""Replaces infinities in the pages. Finite numbers are not changed.

An infinity would spoil other requests, because times their zero weight it is NaN. The output of the
request that computed it is meaningless anyway, so any number will do. This one is within float16's
range of 65,504, and sums with it stay finite."""
_LEAST = 1e-30
"""A group with only smaller numbers is stored as zeros: its scale would have no precision."""
SCALE_BYTES = 2


class KVFormat(Protocol):
    """A storage format for a head's numbers.

    Attributes:
        storage: element type of the pages' tensors; different for each format.
        group: how many numbers share a scale; None means all of a head. Not used without scales.
    """

    @property
    def storage(self) -> torch.dtype: ...

    @property
    def group(self) -> int | None: ...

    def width(self, head_dim: int) -> int:
        """The number of elements of `storage` that a head takes."""
        ...

    def encode(self, x: Tensor) -> Tensor:
        """Make numbers finite and store them: `x` [..., head_dim] to [..., width]."""
        ...

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Read numbers back: [..., width] to [..., head_dim], finite in `dtype`."""
        ...


@dataclass(frozen=True)
class Unquantized:
    """Implements `KVFormat`: unquantized numbers."""

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
        tops: targets for scaling a group's number of the largest magnitude. Of several, the one
            with the least sum of squared errors is chosen. A negative target gives a group whose
            largest number is positive a negative scale.
        rounded: rounds scaled numbers, float32, to the nearest ones with a code.
        pack: converts numbers with a code, [..., groups, group], to bytes, [..., bytes].
        unpack: converts bytes to float32, [..., numbers].
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
        most = torch.finfo(dtype).max  # scales are rounded, so the largest number may exceed it
        wide: Tensor = (groups * scales[..., None]).flatten(-2)
        return wide.clamp_(-most, most).to(dtype)

    def _scaled(self, groups: Tensor, largest: Tensor, top: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return scales [..., groups, 1], rounded scaled numbers, and sums of squared errors."""
        scales = (largest / top).to(torch.bfloat16).float()
        divisors = torch.where(scales == 0, 1.0, scales)
        scaled = torch.where(scales == 0, 0.0, groups / divisors)
        numbers = self.rounded(scaled)
        return scales, numbers, _sum_of_squares((numbers - scaled) * scales)

    def _split(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Split bytes [..., width] into codes [..., bytes] and scales [..., groups]."""
        width = stored.shape[-1]
        # Each group has a scale; without groups a head has one.
        num_scales = width // (self.group * self.bits // 8 + SCALE_BYTES) if self.group else 1
        codes, scales = stored.tensor_split([width - num_scales * SCALE_BYTES], -1)
        return codes, scales.contiguous().view(torch.bfloat16).float()


def _in_groups(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, size)


def _sum_of_squares(x: Tensor) -> Tensor:
    """Sum squares over the last dimension, in float64, where they are exact, in a fixed order.

    The second half is added to the first until one number is left. All implementations that sum
    errors this way choose the same scale.
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
    """Pack the two halves of a group into the same bytes; a nibble is the number plus 8."""
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
# The position of the largest number within its binade determines the rounding of the others.
_FP8 = Quantized(
    torch.float8_e4m3fn,
    group=None,
    bits=8,
    tops=tuple(224 * 2 ** (place / 8) for place in range(8)),
    rounded=lambda scaled: _to_e4m3(scaled).float(),
    pack=lambda numbers: _to_e4m3(numbers).view(torch.uint8).flatten(-2),
    unpack=lambda codes: codes.view(torch.float8_e4m3fn).float(),
)
# Of the 16 codes, -8 has no positive counterpart. So the largest number is scaled to -8, or to a
# value between codes if that has less error for the whole group.
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
"""Formats by `KVLayout.dtype`."""
_BY_STORAGE = {kv_format.storage: kv_format for kv_format in FORMATS.values()}


def format_of(pages: Tensor) -> KVFormat:
    """The format of these pages."""
    return _BY_STORAGE[pages.dtype]


def format_name(kv_cache_dtype: str, dtype: torch.dtype, head_dim: int) -> str:
    """The key of `FORMATS` for a setting, for a model that computes in `dtype`.

    Raises:
        ConfigError: the format does not support heads of this size.
    """
    if kv_cache_dtype == "auto":
        return str(dtype).removeprefix("torch.")
    name = kv_cache_dtype.removesuffix("_e4m3")  # vLLM's spelling
    group = FORMATS[name].group
    if group and head_dim % group:
        raise ConfigError(
            f"kv_cache_dtype = {kv_cache_dtype!r} has a scale for every {group} numbers of a head,"
            f" and this model's have {head_dim}; 'int8' and 'fp8' take heads of any size"
        )
    return name
