"""Rotary angles of all positions.

Owns the scaling of frequencies to longer contexts. Must not know heads or the kernels of devices.
"""

import torch
from torch import Tensor

from charonia.data.model.spec import RopeSpec
from charonia.data.ops.base import Rotation


def rotation_table(
    rope: RopeSpec, head_dim: int, num_positions: int, dtype: torch.dtype, device: torch.device
) -> Rotation:
    """Tabulate cosines and sines of all positions, [num_positions, head_dim / 2] each."""
    angles = torch.outer(
        torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim)
    )
    return Rotation(angles.cos().to(device, dtype), angles.sin().to(device, dtype))


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair of a head's dimensions, float32 [head_dim / 2].

    "linear" divides all by `factor`. "llama3" (Llama 3.1's published recipe) leaves wavelengths
    shorter than original_max_position_embeddings / high_freq_factor, divides those longer than
    original_max_position_embeddings / low_freq_factor, and interpolates between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    turns = rope.original_max_position_embeddings * frequencies / (2 * torch.pi)
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0.0, 1.0)  # 1 keeps a frequency, 0 divides it by the factor
    return (1 - share) * frequencies / rope.factor + share * frequencies
