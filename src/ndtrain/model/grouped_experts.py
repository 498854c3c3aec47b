"""All experts of a layer in one product each way, in layouts that every kernel takes.

Tokens are sorted by expert, so that each expert's rows lie together, and multiplied with the
matrices of all experts at once. On CUDA the product behind the gradient of the matrices wants both
operands row by row: how many rows an expert gets follows from the tokens, and a layout in which
that number is a stride must be a multiple of 16 bytes. A compiler is free to choose that layout, so
both products are operations of their own to it, and make their operands what they need to be.

The function has the interface that transformers has for experts; `use_experts` decides which models
take it.

Shape letters: T tokens, C chosen experts of a token, S = T * C rows, E experts, K inputs,
N outputs.
"""

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "ndtrain"


def grouped_experts(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Each token's chosen experts, weighted and summed up.

    Args:
        module: transformers' module of experts; their matrices are [E, N, K], or [E, K, N] where
            `is_transposed`.
        hidden_states: [T, K].
        top_k_index: numbers of the chosen experts [T, C].
        top_k_weights: their shares [T, C].

    Returns:
        The sums [T, K].
    """
    tokens, chosen = top_k_index.shape
    experts, order = top_k_index.reshape(-1).sort(stable=True)
    rows = hidden_states[order // chosen]
    numbers = torch.arange(module.num_experts, device=experts.device)
    ends = torch.searchsorted(experts, numbers, right=True).int()
    name = "gate_up_proj" if module.has_gate else "up_proj"
    wide = _product(module, name, rows, experts, ends)
    wide = module._apply_gate(wide) if module.has_gate else module.act_fn(wide)
    outputs = _product(module, "down_proj", wide, experts, ends)
    if module.has_post_expert_norm:
        outputs = module.post_expert_norm(outputs)
    outputs = outputs * top_k_weights.reshape(-1)[order, None]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    sums: torch.Tensor = outputs[back].view(tokens, chosen, -1).sum(1)
    return sums.to(hidden_states.dtype)


def _product(
    module: Any, name: str, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Rows [S, K] times their expert's matrix, and its bias."""
    matrices = getattr(module, name)
    if not module.is_transposed:
        matrices = matrices.transpose(-2, -1)
    outputs: torch.Tensor = grouped_product(rows.to(matrices.dtype), matrices, ends)
    if module.has_bias:
        outputs = outputs + getattr(module, f"{name}_bias")[experts]
    return outputs


@torch.library.custom_op("ndtrain::grouped_product", mutates_args=())
def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each row times the matrix of its group.

    Args:
        rows: [S, K], group after group.
        matrices: [E, K, N], one a group.
        ends: one past each group's last row [E], int32.

    Returns:
        The products [S, N].
    """
    return torch.nn.functional.grouped_mm(rows.contiguous(), matrices, offs=ends)


@grouped_product.register_fake
def _(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[-1])


@torch.library.custom_op("ndtrain::grouped_outer", mutates_args=())
def grouped_outer(lefts: torch.Tensor, rights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Sum of the outer products of each group's rows.

    Args:
        lefts: [S, K], group after group.
        rights: [S, N].
        ends: one past each group's last row [E], int32.

    Returns:
        One sum a group [E, K, N]; zeros for a group without rows.
    """
    return torch.nn.functional.grouped_mm(
        lefts.contiguous().t(), rights.contiguous(), offs=ends
    ).contiguous()


@grouped_outer.register_fake
def _(lefts: torch.Tensor, rights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return lefts.new_empty(ends.shape[0], lefts.shape[1], rights.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows, matrices, ends = ctx.saved_tensors
    wants_rows, wants_matrices, _ = ctx.needs_input_grad
    by_rows = by_matrices = None
    if wants_rows:
        by_rows = grouped_product(gradient, matrices.transpose(-2, -1), ends)
    if wants_matrices:
        by_matrices = grouped_outer(rows, gradient, ends)
    return by_rows, by_matrices, None


grouped_product.register_autograd(_backward, setup_context=_keep)


@register_flop_formula([torch.ops.ndtrain.grouped_product, torch.ops.ndtrain.grouped_outer])
def _grouped_flops(rows: torch.Size, other: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * rows[0] * rows[1] * other[-1]


def register_grouped_experts() -> None:
    """Make the function known to transformers under `NAME`."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
