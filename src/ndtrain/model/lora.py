"""Linears with a low-rank adapter (LoRA, Hu et al. 2021), computed with few passes over memory.

An adapter's products have a rank of 16 or so: they cost no arithmetic to speak of, but each one,
and each scaling and sum around it, reads and writes whole activations. So linears that read the
same input are computed together: one product with all their A matrices, the scale on its small
result, and the big products added onto the small ones as they are written.

Shape letters: T tokens, I input features, O output features, R rank, N linears of one input.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import register_flop_formula

ADAPTER = "default"
"""The name under which peft keeps the one adapter of a run."""

SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears of one module that usually read the same input; whether they do is seen at each call."""


class LoraLinear(nn.Module):
    """x W^T + s (x A^T) B^T, with the parameter names that peft gives.

    Args:
        adapted: peft's linear, whose parts are taken over.
    """

    def __init__(self, adapted: Any) -> None:
        super().__init__()
        self.base_layer = adapted.base_layer
        self.lora_A = adapted.lora_A
        self.lora_B = adapted.lora_B
        self.lora_dropout = adapted.lora_dropout
        self.scaling = adapted.scaling
        self.shared = SharedInput((self,))

    @property
    def weight(self) -> torch.Tensor:
        """The base's weight, for readers of a model who expect a linear here."""
        weight: torch.Tensor = self.base_layer.weight
        return weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs [..., O] of inputs [..., I]."""
        if self.shared.suits(inputs):
            return self.shared.output_of(self, inputs)
        first, second = self.lora_A[ADAPTER], self.lora_B[ADAPTER]
        outputs: torch.Tensor = self.base_layer(inputs)
        low = first(self.lora_dropout[ADAPTER](inputs.to(first.weight.dtype)))
        gained = second(low * self.scaling[ADAPTER])
        total: torch.Tensor = (outputs + gained).to(outputs.dtype)
        return total

    def computes_plainly(self, inputs: torch.Tensor) -> bool:
        """Whether four plain matrices of the inputs' dtype make the output, the base's frozen."""
        base = self.base_layer
        linears = (base, self.lora_A[ADAPTER], self.lora_B[ADAPTER])
        # split, quantised and 8-bit linears multiply in ways of their own
        if any(type(linear) is not nn.Linear for linear in linears):
            return False
        dropout = self.lora_dropout[ADAPTER]
        if getattr(dropout, "p", 0.0) and self.training:
            return False
        matrices = [linear.weight for linear in linears]
        if any(isinstance(one, DTensor) or one.dtype != inputs.dtype for one in matrices):
            return False
        return not any(one.requires_grad for one in (base.weight, base.bias) if one is not None)


class SharedInput:
    """Adapted linears that read one input; the first one called computes the outputs of all.

    Args:
        members: the linears.
    """

    def __init__(self, members: Sequence[LoraLinear]) -> None:
        self._members = tuple(members)
        self._inputs: torch.Tensor | None = None
        self._outputs: dict[int, torch.Tensor] = {}

    def suits(self, inputs: torch.Tensor) -> bool:
        """Whether every member can be computed in common."""
        return all(member.computes_plainly(inputs) for member in self._members)

    def output_of(self, member: LoraLinear, inputs: torch.Tensor) -> torch.Tensor:
        """One member's output [..., O]; the others' are kept until they are asked for."""
        number = self._members.index(member)
        if self._inputs is not inputs or number not in self._outputs:
            outputs = shared_products(inputs, self._members)
            self._inputs, self._outputs = inputs, dict(enumerate(outputs))
        output = self._outputs.pop(number)
        if not self._outputs:
            self._inputs = None
        return output


def shared_products(inputs: torch.Tensor, members: Sequence[LoraLinear]) -> list[torch.Tensor]:
    """Outputs [..., O] of every member for the same inputs [..., I]."""
    outputs = _SharedProducts.apply(  # type: ignore[no-untyped-call]
        inputs.flatten(0, -2),
        [member.scaling[ADAPTER] for member in members],
        *(member.base_layer.weight for member in members),
        *(member.base_layer.bias for member in members),
        *(member.lora_A[ADAPTER].weight for member in members),
        *(member.lora_B[ADAPTER].weight for member in members),
    )
    return [output.view(*inputs.shape[:-1], output.shape[-1]) for output in outputs]


class _SharedProducts(torch.autograd.Function):
    """Forward and backward of linears with one input, whose weights W and biases are frozen."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, scales: list[float], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        weights, biases, firsts, seconds = _in_groups(parts, 4)
        # the scale goes onto the small matrices; the results stay columns of one product
        scaled = [first * scale for first, scale in zip(firsts, scales, strict=True)]
        low = inputs @ torch.cat(scaled).T
        lows = _columns(low, firsts)
        ctx.save_for_backward(inputs, low, *weights, *firsts, *seconds)
        ctx.scales = scales
        return tuple(
            sum_of_products([low, inputs], [second.T, weight.T], bias)
            for low, weight, bias, second in zip(lows, weights, biases, seconds, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        inputs, low, *saved = ctx.saved_tensors
        count = len(grads)
        weights, firsts, seconds = _in_groups(saved, 3)
        lows = _columns(low, firsts)
        second_grads = [grad.T @ low for grad, low in zip(grads, lows, strict=True)]
        low_grads = torch.cat(
            [
                (grad @ second) * scale
                for grad, second, scale in zip(grads, seconds, ctx.scales, strict=True)
            ],
            dim=1,
        )
        first_grads = torch.split(low_grads.T @ inputs, [first.shape[0] for first in firsts])
        input_grad = sum_of_products([low_grads, *grads], [torch.cat(list(firsts)), *weights], None)
        nothing = [None] * count
        return input_grad, None, *nothing, *nothing, *first_grads, *second_grads


def _in_groups(tensors: Sequence[torch.Tensor], number: int) -> list[list[torch.Tensor]]:
    count = len(tensors) // number
    return [list(tensors[start : start + count]) for start in range(0, number * count, count)]


def _columns(low: torch.Tensor, firsts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The columns [T, R] of each member."""
    return torch.split(low, [first.shape[0] for first in firsts], dim=1)


@torch.library.custom_op("ndtrain::sum_of_products", mutates_args=())
def sum_of_products(
    lefts: list[torch.Tensor], rights: list[torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """Sum of left @ right over the pairs, [T, O], each product added onto what is there.

    One operation to the compiler, which otherwise copies the sum before it adds to it.

    Args:
        lefts: matrices [T, K], K of each pair's own; the smallest product comes first.
        rights: matrices [K, O].
        bias: [O], added to every row.
    """
    first, second = lefts[0], rights[0]
    total = first @ second if bias is None else torch.addmm(bias, first, second)
    for left, right in zip(lefts[1:], rights[1:], strict=True):
        total.addmm_(left, right)
    return total


@sum_of_products.register_fake
def _(
    lefts: list[torch.Tensor], rights: list[torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    return lefts[0].new_empty(lefts[0].shape[0], rights[0].shape[1])


@register_flop_formula(torch.ops.ndtrain.sum_of_products)
def _sum_of_products_flops(
    lefts: list[torch.Size], rights: list[torch.Size], *_: Any, **__: Any
) -> int:
    return sum(2 * left[0] * left[1] * right[1] for left, right in zip(lefts, rights, strict=True))


def use_lora_linears(model: nn.Module) -> None:
    """Put a `LoraLinear` in the place of each of peft's plain LoRA linears, in place."""
    for name, module in list(model.named_modules()):
        is_plain = isinstance(getattr(module, "base_layer", None), nn.Linear)
        if is_plain and not module.lora_variant:
            model.set_submodule(name, LoraLinear(module))
    for module in model.modules():
        for names in SHARED_INPUTS:
            members = [getattr(module, name, None) for name in names]
            adapted = [one for one in members if isinstance(one, LoraLinear)]
            shared = SharedInput(adapted)
            for one in adapted:
                one.shared = shared
