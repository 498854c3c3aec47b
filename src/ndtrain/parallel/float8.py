"""Matrix products of a model's blocks in 8-bit floats, forward and backward.

Operands are scaled so that their largest value nearly fills the format: with one scale a tensor
(`tensorwise`), or one a row of each operand (`rowwise`). A scale is a power of two. It then moves
exponents only, so that the rounding of a value does not depend on what else its rank holds: but
for values 28,672 times smaller than the largest, a mesh rounds as one process does.
Weights, results and gradients keep their dtypes.

Formats: Micikevicius et al., FP8 formats for deep learning, 2022; e4m3 for values, and e5m2,
which reaches further, for gradients with one scale.

Shape letters: T tokens, I input features, O output features, C the features summed over.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ndtrain.errors import MeshError
from ndtrain.parallel.linear import ColumnLinear, RowLinear, local

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_LARGEST = {VALUES: 448.0, GRADIENTS: 57344.0}
_SMALLEST_TOP = 1e-12
_EXPONENT_BITS = 0x7F800000
_MULTIPLE = 16
"""What the sizes of a product on tensor cores must be multiples of."""


def _scale(values: torch.Tensor, largest: float, *, by_row: bool) -> torch.Tensor:
    """The power of two that brings the largest of all values, or of each row, below `largest`."""
    size = values.abs()
    top = size.amax(-1, keepdim=True) if by_row else size.amax()
    share = largest / top.float().clamp(min=_SMALLEST_TOP)
    return (share.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)


def product(
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    left_dtype: torch.dtype,
    by_row: bool,
    fast: bool = False,
) -> torch.Tensor:
    """`left @ right.T` with both operands in 8 bits, in the dtype of `left`.

    On CPU the same numbers are multiplied in fp32.

    Args:
        left: [M, C].
        right: [N, C].
        left_dtype: 8-bit format of `left`; `right` has the one of values.
        by_row: one scale a row of each operand instead of one for all.
        fast: let tensor cores add up with fewer bits.
    """
    scales = (
        _scale(left, _LARGEST[left_dtype], by_row=by_row),
        _scale(right, _LARGEST[VALUES], by_row=by_row),
    )
    one = (left.float() * scales[0]).to(left_dtype)
    other = (right.float() * scales[1]).to(VALUES)
    back = 1 / scales[0], (1 / scales[1]).t()
    if left.device.type == "cpu":
        return multiply_plainly(one, other, back, left.dtype)
    return multiply_on_cores(one, other, back, left.dtype, fast=fast)


Scales = tuple[torch.Tensor, torch.Tensor]
"""What the rows and the columns of a result are multiplied by: scalars, or [M, 1] and [1, N]."""


def multiply_plainly(
    left: torch.Tensor, right: torch.Tensor, back: Scales, dtype: torch.dtype
) -> torch.Tensor:
    """What tensor cores compute, in fp32: [M, C] and [N, C], in 8 bits, to [M, N]."""
    return ((left.float() @ right.float().t()) * (back[0] * back[1])).to(dtype)


def multiply_on_cores(
    left: torch.Tensor, right: torch.Tensor, back: Scales, dtype: torch.dtype, *, fast: bool
) -> torch.Tensor:
    """The same on tensor cores."""
    result: torch.Tensor = torch._scaled_mm(
        left.contiguous(),
        right.contiguous().t(),
        scale_a=back[0],
        scale_b=back[1],
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return result


class _Float8Product(torch.autograd.Function):
    """[T, I] and [O, I] to [T, O]; all three products of the two passes in 8 bits."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, by_row: bool) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.by_row = by_row
        return product(inputs, weight, left_dtype=VALUES, by_row=by_row, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        (gradient,) = gradients
        # rows of gradients have scales of their own and need no further reach
        how: dict[str, Any] = {
            "left_dtype": VALUES if ctx.by_row else GRADIENTS,
            "by_row": ctx.by_row,
        }
        of_inputs = of_weight = None
        if ctx.needs_input_grad[0]:
            of_inputs = product(gradient, weight.t(), **how)
        if ctx.needs_input_grad[1]:
            missing = -gradient.shape[0] % _MULTIPLE
            parts = (gradient.t(), inputs.t())
            if missing:
                # the sum over tokens goes on over zeros
                parts = (
                    functional.pad(parts[0], (0, missing)),
                    functional.pad(parts[1], (0, missing)),
                )
            of_weight = product(*parts, **how)
        return of_inputs, of_weight, None


def float8_linear(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    by_row: bool,
) -> torch.Tensor:
    """`functional.linear` with its products in 8 bits: [..., I] to [..., O]."""
    flat = inputs.reshape(-1, inputs.shape[-1])
    outputs: torch.Tensor = _Float8Product.apply(  # type: ignore[no-untyped-call]
        flat, weight, by_row
    )
    outputs = outputs.reshape(*inputs.shape[:-1], weight.shape[0])
    return outputs if bias is None else outputs + bias


class Float8Linear(nn.Linear):
    """A linear with its products in 8 bits; its parameters are those of the one it replaces.

    Args:
        linear: may be on the meta device.
        multiply: what stands for `functional.linear`.
    """

    def __init__(self, linear: nn.Linear, multiply: Callable[..., torch.Tensor]) -> None:
        super().__init__(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta"
        )
        self.weight, self.bias = linear.weight, linear.bias
        self._multiply = multiply

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply it: [..., I] to [..., O]."""
        return self._multiply(input, self.weight, self.bias)


def apply_float8(blocks: Iterable[nn.Module], kind: str) -> None:
    """Let the linears of the blocks multiply in 8 bits, in place.

    Linears whose sizes on this rank are no multiples of 16 stay as they are.

    Args:
        blocks: the model's blocks, split over tp already.
        kind: `tensorwise` or `rowwise`.

    Raises:
        MeshError: no linear can.
    """
    multiply = partial(float8_linear, by_row=kind == "rowwise")
    changed = 0
    for block in blocks:
        for name, module in list(block.named_modules()):
            if not isinstance(module, nn.Linear | ColumnLinear | RowLinear):
                continue
            if any(size % _MULTIPLE for size in local(module.weight).shape):
                continue
            changed += 1
            if isinstance(module, nn.Linear):
                block.set_submodule(name, Float8Linear(module, multiply))
            else:
                module.multiply = multiply
    if not changed:
        raise MeshError(
            f"no linear of the blocks has sizes on a rank that are multiples of {_MULTIPLE}.",
            where="fp8",
            hint="Remove fp8.",
        )
