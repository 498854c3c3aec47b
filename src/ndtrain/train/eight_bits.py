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
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Below it one over the scale can be infinite."""


def blocks(values: torch.Tensor, count: int) -> torch.Tensor:
    """[R, C] as [R, N, E]."""
    return values.reshape(*values.shape[:-1], count, values.shape[-1] // count)


def encode_signed(values: torch.Tensor, chance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [R, N, E] and scales fp32 [R, N] of values of either sign.

    Args:
        values: fp32 [R, N, E].
        chance: uniform from 0 to 1, of the same shape.
    """
    size = values.abs()
    scales = size.amax(-1)
    share = _share(size, scales)
    # the code below, then the one above it with the chance that keeps the expectation
    below = (share.sqrt() * _SIGNED).floor().clamp(max=_SIGNED - 1)
    low, high = below / _SIGNED, (below + 1) / _SIGNED
    codes = _raise_by_chance(share, below, low * low, high * high, chance)
    return codes.copysign(values).to(torch.int8), scales


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
    # the fourth root, in two instructions of a GPU
    below = (share.rsqrt().rsqrt() * _UNSIGNED).floor().clamp(max=_UNSIGNED - 1)
    low, high = _fourth_power(below / _UNSIGNED), _fourth_power((below + 1) / _UNSIGNED)
    codes = _raise_by_chance(share, below, low, high, chance).clamp(min=1)
    return codes.to(torch.uint8), scales


def decode_positive(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values fp32 [R, N, E]."""
    return _fourth_power(codes.float() / _UNSIGNED) * scales[..., None]


def _fourth_power(root: torch.Tensor) -> torch.Tensor:
    square = root * root
    return square * square


def _share(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values as shares of the largest of their block; 0 where all are next to 0.

    One division a block: of each element it would take the update longer than its memory.
    """
    factors = torch.where(scales >= _SMALLEST_SCALE, 1.0 / scales, 0.0)
    return values * factors[..., None]


def _raise_by_chance(
    share: torch.Tensor,
    below: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    chance: torch.Tensor,
) -> torch.Tensor:
    """The code below a share or the one above it, which stand for the shares `low` and `high`."""
    return below + (chance * (high - low) < share - low)
