"""Products with weights of 8 bits, in plain torch.

Owns how weights and activations are rounded to whole numbers; the CPU kernels do the same. Must not
know layers.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""x [rows, inputs] to x Wᵀ + b, [rows, outputs], of the same type."""
_MOST_INPUTS = 1024
"""Numbers of a row that share a step, at most. Sums of so many products are exact in float32."""
_MULTIPLE = 64
_LEAST = 1e-30
"""Smaller numbers are taken as zeros."""
_LEAST_EXPONENT = -24
"""Of the smallest power of two in float16."""


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each output's weights to 255 even steps between plus and minus the largest.

    Args:
        weight: [outputs, inputs].

    Returns:
        Integers, int8 [outputs, inputs], and the size of a step, float32 [outputs].
    """
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / 127
    steps = torch.where(scales > 0, scales, 1.0)[:, None]
    return torch.round(wide / steps).to(torch.int8), scales


def group_bounds(inputs: int) -> list[int]:
    """Return where the groups of a row begin, and behind it where the last one ends.

    Numbers of a group share a step. Groups have about one size: at most 1,024 numbers, and a
    multiple of 64, but for the last one.
    """
    multiples = -(-inputs // _MULTIPLE)
    count = -(-multiples * _MULTIPLE // _MOST_INPUTS)
    bounds = [group * multiples // count * _MULTIPLE for group in range(count)]
    return [*bounds, inputs]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each group of a row's numbers to 255 steps between plus and minus the largest.

    Args:
        x: [rows, inputs].

    Returns:
        Whole numbers, float32 [rows, inputs], and the size of a step, float32 [rows, groups].
    """
    numbers, steps = [], []
    for first, end in pairwise(group_bounds(x.shape[1])):
        group = x[:, first:end].float()
        most = group.abs().amax(dim=1)
        is_zero = most < _LEAST
        # A number divided by a tensor would be multiplied by a rounded reciprocal.
        inverse = torch.where(is_zero, 0.0, torch.full_like(most, 127.0) / most)
        numbers.append(torch.round(group * inverse[:, None]))
        steps.append(torch.where(is_zero, 0.0, most / 127))
    return torch.cat(numbers, dim=1), torch.stack(steps, dim=1)


def int8_linear(
    linear: Callable[[Tensor, Tensor, None], Tensor], weight: Tensor, bias: Tensor | None
) -> Linear:
    """Prepare products of `linear` with weights kept as int8."""
    whole, scales = quantize_int8(weight)
    powers = None
    if weight.dtype == torch.float16:
        powers, scales = _split_off_powers(scales)

    def multiply(x: Tensor) -> Tensor:
        read = whole.to(x.dtype)
        if powers is not None:
            read *= powers
        # In float32: a scale rounded to bfloat16 would be off by up to 0.2 % for all inputs.
        y = linear(x, read, None) * scales
        return (y if bias is None else y + bias).to(x.dtype)

    return multiply


def _split_off_powers(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Split scales into powers of two, float16 [outputs, 1], and the rests, float32 [outputs].

    A sum of whole numbers soon exceeds float16's 65,504. Whole numbers times these powers are exact
    in float16, and their sum is no larger than the final one, because a rest is at least 1. Only
    that of a scale below the least power is smaller, and such sums are small.
    """
    _, exponents = torch.frexp(scales)
    exponents = (exponents - 1).clamp(min=_LEAST_EXPONENT)
    powers = torch.ldexp(torch.ones_like(scales), exponents)
    return powers.half()[:, None], scales / powers


def w8a8_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Prepare products of whole numbers, with weights kept as int8 and rows rounded to such."""
    whole, scales = quantize_int8(weight)

    bounds = group_bounds(weight.shape[1])

    def multiply(x: Tensor) -> Tensor:
        rows, steps = quantize_rows(x)
        y = torch.zeros(len(x), len(whole), dtype=torch.float32, device=x.device)
        for group, (first, end) in enumerate(pairwise(bounds)):  # a group's own sum is exact
            y += (rows[:, first:end] @ whole[:, first:end].float().T) * steps[:, group, None]
        y *= scales
        return (y if bias is None else y + bias).to(x.dtype)

    return multiply
