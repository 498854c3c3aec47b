"""Frozen linears held in 4 or 8 bits, for adapters on large bases; plain torch on any device.

Four bits are NormalFloat4 (Dettmers et al. 2023, "QLoRA"): blocks of 64 values of a row share the
largest magnitude, and each value becomes the nearest of 16 levels, as in bitsandbytes. Eight bits
are integers with one scale a row. Everything is stored as bytes in two parameters that never
train, so that sharding splits them by rows and never casts them.

Shape letters: O output features, I input features, G = I / 64 blocks of a row.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import Function
from torch.nn import functional

Bits = Literal[4, 8]
BLOCK = 64

_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The levels of NormalFloat4: quantiles of a normal distribution, zero among them."""


def encode_rows(rows: torch.Tensor, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the values and bytes of the scales of rows [O, I] of a weight."""
    exact = rows.to(torch.float32).contiguous()
    if bits == 8:
        scale = exact.abs().amax(1, keepdim=True)
        values = torch.round(exact / scale.clamp_min(1e-30) * 127).to(torch.int8)
        return values.view(torch.uint8), scale.contiguous().view(torch.uint8)
    blocks = exact.view(exact.shape[0], -1, BLOCK)
    scale = blocks.abs().amax(2)
    levels = torch.tensor(_LEVELS, device=rows.device)
    borders = (levels[1:] + levels[:-1]) / 2
    nearest = torch.bucketize(blocks / scale.clamp_min(1e-30)[..., None], borders)
    pairs = nearest.view(exact.shape[0], -1, 2).to(torch.uint8)
    return pairs[..., 0] * 16 + pairs[..., 1], scale.contiguous().view(torch.uint8)


def decode_rows(
    values: torch.Tensor, scales: torch.Tensor, bits: Bits, dtype: torch.dtype
) -> torch.Tensor:
    """The weight rows [O, I] behind bytes from `encode_rows`."""
    scale = scales.view(torch.float32)
    if bits == 8:
        return values.view(torch.int8).to(dtype) * (scale / 127).to(dtype)
    levels = torch.tensor(_LEVELS, device=values.device, dtype=dtype)
    # both values of a byte at once: a table of 256 pairs
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1)
    blocks = functional.embedding(values.int(), pairs).view(*scale.shape, BLOCK)
    return (blocks * scale.to(dtype)[..., None]).flatten(1)


class _Product(Function):
    """x W^T that keeps the bytes of W for the backward pass, never W itself."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bits: Bits
    ) -> torch.Tensor:
        ctx.save_for_backward(values, scales)
        ctx.bits = bits
        return functional.linear(inputs, decode_rows(values, scales, bits, inputs.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        values, scales = ctx.saved_tensors
        weight = decode_rows(values, scales, ctx.bits, gradient.dtype)
        return gradient @ weight, None, None, None


class QuantisedLinear(nn.Linear):
    """A linear whose frozen weight is held in few bits.

    Args:
        linear: gives sizes and bias; its weight is dropped and loaded again later.
        bits: 4 or 8.
    """

    def __init__(self, linear: nn.Linear, bits: Bits) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bits: Bits = bits
        device = linear.weight.device
        width = linear.in_features // 2 if bits == 4 else linear.in_features
        blocks = linear.in_features // BLOCK if bits == 4 else 1

        def stored(columns: int) -> nn.Parameter:
            empty = torch.empty(linear.out_features, columns, dtype=torch.uint8, device=device)
            return nn.Parameter(empty, requires_grad=False)

        self.weight = stored(width)
        self.scales = stored(4 * blocks)
        self.bias = linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiply by the decoded weight, which exists only for that moment."""
        outputs: torch.Tensor = _Product.apply(inputs, self.weight, self.scales, self.bits)  # type: ignore[no-untyped-call]
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)

    def extra_repr(self) -> str:
        """Sizes and bits."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


def can_quantise(linear: nn.Module, bits: Bits) -> bool:
    """Whether the linear's rows divide into whole blocks."""
    return type(linear) is nn.Linear and (bits == 8 or linear.in_features % BLOCK == 0)


def quantisable(model: nn.Module, bits: Bits, keep: Sequence[nn.Module] = ()) -> list[str]:
    """Names of the linears that are quantised; all but `keep` and those that do not divide."""
    kept = {id(module) for module in keep}
    return [
        name
        for name, module in model.named_modules()
        if id(module) not in kept and can_quantise(module, bits)
    ]


def quantise_linears(model: nn.Module, names: Sequence[str], bits: Bits) -> None:
    """Replace the named linears, in place; usually on the meta device."""
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(name, QuantisedLinear(linear, bits))


@torch.no_grad()
def round_linears(model: nn.Module, names: Sequence[str], bits: Bits) -> None:
    """Give plain linears the values that their quantised counterparts compute with."""
    for name in names:
        weight = model.get_submodule(name).get_parameter("weight")
        weight.copy_(decode_rows(*encode_rows(weight, bits), bits, weight.dtype))
