"""Rounding by chance: unbiased, and the same for an element wherever it lives."""

import zlib

import pytest
import torch

from ndtrain.train.eight_bits import (
    decode_positive,
    decode_signed,
    encode_positive,
    encode_signed,
)
from ndtrain.train.rounding import (
    chances,
    mix,
    other_bits,
    places_of,
    random_bits,
    round_to_bf16,
    upper_half,
)

ROWS, COLUMNS = 1000, 1000


def bits_of(name: str = "weight", seed: int = 42, step: int = 1) -> torch.Tensor:
    places = places_of(torch.empty(ROWS, COLUMNS), name, seed)
    return random_bits(places.rows, places.columns, mix(torch.tensor(step, dtype=torch.int32)))


def shares(bits: torch.Tensor) -> torch.Tensor:
    """The two independent chances that each element's bits give, and a third."""
    drawn = (bits, upper_half(bits), other_bits(bits))
    return torch.stack([chances(one).flatten() for one in drawn])


def test_the_bits_are_uniform_and_independent() -> None:
    """A million draws: mean 1/2 and variance 1/12 within 5 standard errors, no correlation."""
    first = shares(bits_of())
    error = 1 / 12**0.5 / (ROWS * COLUMNS) ** 0.5
    assert first.mean(1).tolist() == pytest.approx([0.5] * 3, abs=5 * error)
    assert first.var(1).tolist() == pytest.approx([1 / 12] * 3, rel=0.01)
    right = bits_of().roll(1, 1)
    below = bits_of().roll(1, 0)
    later, other, seeded = bits_of(step=2), bits_of("bias"), bits_of(seed=43)
    beside = [chances(one).flatten() for one in (right, below, later, other, seeded)]
    together = torch.corrcoef(torch.cat([first, torch.stack(beside)]))
    assert (together - torch.eye(len(together))).abs().max() < 5e-3


def hashed(number: int) -> int:
    """The finaliser over unsigned numbers, written out."""
    number &= 0xFFFFFFFF
    number = (number ^ number >> 16) * 0x7FEB352D & 0xFFFFFFFF
    number = (number ^ number >> 15) * 0x846CA68B & 0xFFFFFFFF
    return number ^ number >> 16


@pytest.mark.parametrize(("row", "column"), [(0, 0), (0, 1), (ROWS - 1, COLUMNS - 1), (17, 400)])
def test_an_element_has_the_bits_of_its_place_in_the_whole_tensor(row: int, column: int) -> None:
    spread = 0x9E3779B1
    place = hashed(hashed(zlib.crc32(b"42:weight")) ^ row * spread)
    wanted = hashed((place ^ column * spread) + hashed(1))
    assert bits_of()[row, column].item() & 0xFFFFFFFF == wanted


def test_elements_have_bits_of_their_own() -> None:
    bits = bits_of()
    assert len(bits.unique()) > 0.999 * bits.numel()


@pytest.mark.parametrize("value", [1.0 + 1e-5, -3.0e-3, 65_000.5, 1e-30])
def test_rounding_to_bf16_keeps_the_mean(value: float) -> None:
    values = torch.full((ROWS, COLUMNS), value)
    rounded = round_to_bf16(values, bits_of()).double()
    below, above = rounded.min().item(), rounded.max().item()
    assert below <= values[0, 0].item() <= above
    assert len(rounded.unique()) <= 2
    spacing = above - below
    assert rounded.mean().item() == pytest.approx(values[0, 0].item(), abs=spacing * 2.5e-3)


def test_what_bf16_holds_is_kept_and_what_is_no_number_stays_so() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = every.float().repeat(16).reshape(ROWS // 1000 * 1024, -1)
    places = places_of(values, "weight", 0)
    bits = random_bits(places.rows, places.columns, torch.tensor(3, dtype=torch.int32))
    assert torch.equal(round_to_bf16(values, bits).float().nan_to_num(7.0), values.nan_to_num(7.0))
    full = torch.full((4,), -1, dtype=torch.int32).view(torch.float32)
    assert round_to_bf16(full, torch.full((4,), 0xFFFF, dtype=torch.int32)).isnan().all()


@pytest.mark.parametrize(
    ("encode", "decode", "signed"),
    [(encode_signed, decode_signed, True), (encode_positive, decode_positive, False)],
)
def test_eight_bit_codes_keep_the_mean_and_the_largest(encode, decode, signed: bool) -> None:
    """Each column holds one value over 1,000 blocks of 10; every mean is right."""
    column = torch.tensor([1e-9, 1e-6, 1e-4, 1e-3, 3e-3, 0.01, 0.1, 0.3, 0.8, 1.0])
    column = column * torch.tensor([1, -1] * 5) if signed else column
    values = column.repeat(100_000, 1)[:, None]
    bits = torch.cat([bits_of(step=step).flatten() for step in range(1)]).reshape(-1, 1, 10)
    codes, scales = encode(values, chances(bits))
    found = decode(codes, scales)[:, 0]
    assert torch.equal(found[:, -1], values[:, 0, -1])
    kept = slice(2, None)
    spread = (found.amax(0) - found.amin(0))[kept]
    assert torch.all((found.mean(0) - column)[kept].abs() <= 0.01 * spread + 1e-9)
    if not signed:
        assert found.min() > 0


def test_a_block_of_zeros_stays_zero() -> None:
    nothing = torch.zeros(3, 2, 16)
    for encode, decode in ((encode_signed, decode_signed), (encode_positive, decode_positive)):
        assert torch.equal(decode(*encode(nothing, torch.rand(3, 2, 16))), nothing)


@pytest.mark.parametrize("largest", [1e-45, 1e-40, 2e-38, 3e38])
def test_codes_of_the_smallest_and_largest_blocks_are_numbers(largest: float) -> None:
    """One over a scale that is next to nothing is infinite."""
    values = torch.linspace(0, 1, 16)[None, None] * largest
    for encode, decode in ((encode_signed, decode_signed), (encode_positive, decode_positive)):
        found = decode(*encode(values, torch.full_like(values, 0.5)))
        assert bool(torch.isfinite(found).all())
        assert found.max() <= values.max()
        if largest >= 2e-38:
            assert found[0, 0, -1] == values[0, 0, -1]
            assert (found - values).abs().max() <= 0.02 * largest
