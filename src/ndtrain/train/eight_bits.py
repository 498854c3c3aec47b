"""Moments of an optimizer in 8 bits: codes, and one scale for each block along the last dim.

Blocks never cross a row, and their length follows from the whole shape, so that sharding rows
leaves them as they are. Codes are spaced by a power of the value: densely near zero, because a
second moment spans many orders of magnitude within a block. Rounding is by chance, and unbiased
in the value: a second moment moves by a thousandth a step, far less than the space between codes.
Block-wise scales are those of 8-bit Adam (Dettmers et al. 2022); its table of codes is not used.

Shape letters: R leading dims, C last dim, N blocks, E elements of a block; C = N x E.
"""

import torch

_SIGNED = 127
_UNSIGNED = 255


def blocks(values: torch.Tensor, count: int) -> torch.Tensor:
    """[R, C] as [R, N, E]."""
    return values.reshape(*values.shape[:-1], count, values.shape[-1] // count)


def encode_signed(values: torch.Tensor, chance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [R, N, E] and scales fp32 [R, N] of values of either sign.

    Args:
        values: fp32 [R, N, E].
        chance: uniform from 0 to 1, of the same shape.
    """
    scales = values.abs().amax(-1)
    share = _share(values.abs(), scales)
    # the code below, then the one above it with the chance that keeps the expectation
    below = (share.sqrt() * _SIGNED).floor().clamp(max=_SIGNED - 1)
    codes = _raise_by_chance(share, below, _SIGNED, 2, chance)
    return (codes * values.sign()).to(torch.int8), scales


def decode_signed(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values fp32 [R, N, E]."""
    root = codes.float() / _SIGNED
    return root * root.abs() * scales[..., None]


def encode_positive(
    values: torch.Tensor, chance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [R, N, E] and scales fp32 [R, N] of values from 0 up.

    A value above zero never becomes zero: it divides the step.

    Args:
        values: fp32 [R, N, E].
        chance: uniform from 0 to 1, of the same shape.
    """
    scales = values.amax(-1)
    share = _share(values, scales)
    below = (share.sqrt().sqrt() * _UNSIGNED).floor().clamp(max=_UNSIGNED - 1)
    codes = _raise_by_chance(share, below, _UNSIGNED, 4, chance).clamp(min=1)
    return codes.to(torch.uint8), scales


def decode_positive(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values fp32 [R, N, E]."""
    root = codes.float() / _UNSIGNED
    square = root * root
    return square * square * scales[..., None]


def _share(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values as shares of the largest of their block; 0 where all are 0."""
    return values / torch.where(scales > 0, scales, 1.0)[..., None]


def _raise_by_chance(
    share: torch.Tensor, below: torch.Tensor, codes: int, power: int, chance: torch.Tensor
) -> torch.Tensor:
    low = (below / codes) ** power
    high = ((below + 1) / codes) ** power
    return below + (chance < (share - low) / (high - low))
