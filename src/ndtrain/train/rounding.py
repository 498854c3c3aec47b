"""Rounding by chance: small updates of numbers that are stored with few bits are kept on average.

The chance is no generator's. Every element of every parameter has random bits that are a pure
function of seed, parameter name, step and its place in the whole tensor, so that copies of a
parameter round alike, a resumed run rounds as it would have, and a mesh as one process does.
"""

import zlib
from dataclasses import dataclass

import torch

from ndtrain.model.regions import region_of

_EVEN_SPREAD = -1640531535
"""A prime near 2^32 over the golden ratio, as a signed number (Knuth, The Art of Computer
Programming, volume 3, section 6.4)."""

_FIRST, _SECOND = 2146121005, -2073254261
"""Multipliers of a 32-bit finaliser with little bias (Wellons, Prospecting for hash functions,
2018), as signed numbers."""

LOW_HALF = 0xFFFF


def mix(bits: torch.Tensor) -> torch.Tensor:
    """Hash int32 values so that each bit of the input changes each bit of the result half the time.

    Multiplication wraps around.
    """
    bits = (bits ^ _shifted(bits, 16)) * _FIRST
    bits = (bits ^ _shifted(bits, 15)) * _SECOND
    return bits ^ _shifted(bits, 16)


def _shifted(bits: torch.Tensor, places: int) -> torch.Tensor:
    """Shift to the right, zeros coming in: torch's own shift repeats the sign."""
    return (bits >> places) & ((1 << (32 - places)) - 1)


@dataclass(frozen=True)
class Places:
    """Hashed places of the elements that this rank holds of a parameter.

    Attributes:
        rows: int32, the local shape with a last dim of 1: seed, name and all but the last index.
        columns: int32 [last local size]: the last index.
    """

    rows: torch.Tensor
    columns: torch.Tensor


def places_of(parameter: torch.Tensor, name: str, seed: int) -> Places:
    """Hash the places of a parameter's local elements, once; they stay as they are.

    Args:
        parameter: plain or sharded in any way.
        name: of the parameter, the same on every mesh.
        seed: of the run.
    """
    device = parameter.device
    indices = [
        torch.cat([torch.arange(start, stop, dtype=torch.int32) for start, stop in dim])
        for dim in region_of(parameter).dims
    ]
    start = zlib.crc32(f"{seed}:{name}".encode())
    rows = mix(torch.tensor(start - (1 << 32) if start >> 31 else start, dtype=torch.int32))
    for index in indices[:-1]:
        rows = mix(rows[..., None] ^ (index * _EVEN_SPREAD))
    return Places(rows[..., None].to(device), (indices[-1] * _EVEN_SPREAD).to(device))


def random_bits(rows: torch.Tensor, columns: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """32 random bits for each local element.

    Args:
        rows: from `Places`.
        columns: from `Places`.
        step: int32 scalar, mixed, so that steps do not follow each other.
    """
    return mix((rows ^ columns) + step)


def other_bits(bits: torch.Tensor) -> torch.Tensor:
    """16 bits more, the lower ones, made of all 32; independent of either half alone.

    One multiplication: whatever is computed for each element counts where the update is bound
    by memory.
    """
    return (bits * _SECOND) >> 16


def round_to_bf16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round fp32 to one of the two nearest bf16 numbers; the expectation is the value itself.

    Args:
        values: fp32.
        bits: int32 of the same shape; the lower 16 are used.

    Returns:
        bf16. What bf16 can hold is kept exactly; infinities and NaN stay what they are.
    """
    # the upper half of an fp32 number is the bf16 number below it in magnitude
    raised = values.view(torch.int32) + (bits & LOW_HALF)
    rounded = (raised & ~LOW_HALF).view(torch.float32)
    # a NaN may have all bits set, which would wrap around
    return torch.where(values.isnan(), values, rounded).to(torch.bfloat16)


def chances(bits: torch.Tensor) -> torch.Tensor:
    """Uniform fp32 numbers from 0 up to, but without, 1, out of the lower 16 bits."""
    return (bits & LOW_HALF).float() * (1.0 / (LOW_HALF + 1))


def upper_half(bits: torch.Tensor) -> torch.Tensor:
    """The upper 16 bits, moved down; what is above them repeats the sign."""
    return bits >> 16
