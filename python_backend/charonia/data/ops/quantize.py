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

    def multiply(x: Tensor) -> Tensor:
        # In float32: a scale rounded to bfloat16 would be off by up to 0.2 % for all inputs.
        y = linear(x, whole.to(x.dtype), None) * scales
        return (y if bias is None else y + bias).to(x.dtype)

    return multiply


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
