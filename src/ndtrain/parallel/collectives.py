"""Collectives that know their own gradient.

Each is a pair: what travels in the forward pass and what travels back. They are built on torch's
functional collectives, so that a compiled block can hold them.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.autograd.function import Function

# renamed in torch 2.13; 2.11 knows the former names only
_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    waited: torch.Tensor = funcol.wait_tensor(tensor)  # type: ignore[no-untyped-call]
    return waited


def reduce_over(tensor: torch.Tensor, how: str, group: dist.ProcessGroup) -> torch.Tensor:
    """Reduce over `group` by `sum` or `max`; has no gradient."""
    return _arrived(funcol.all_reduce(tensor.contiguous(), how, group))


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return reduce_over(tensor, "sum", group)


def _gather(
    tensor: torch.Tensor, dim: int, sizes: tuple[int, ...], group: dist.ProcessGroup
) -> torch.Tensor:
    """Concatenate the ranks' parts along `dim`; the parts may differ in length."""
    longest = max(sizes)
    moved = tensor.movedim(dim, 0)
    if moved.shape[0] < longest:
        padding = moved.new_zeros(longest - moved.shape[0], *moved.shape[1:])
        moved = torch.cat([moved, padding])
    whole = _arrived(_all_gather(moved.contiguous(), 0, group))
    if any(size != longest for size in sizes):
        parts = torch.split(whole, longest)
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    return whole.movedim(0, dim)


def _gather_equal(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the ranks' parts of equal length along `dim`."""
    return _gather(tensor, dim, (tensor.shape[dim],) * dist.get_world_size(group), group)


def _sum_and_scatter(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's equal part along `dim` of the sum over `group`."""
    moved = tensor.movedim(dim, 0).contiguous()
    return _arrived(_reduce_scatter(moved, "sum", 0, group)).movedim(0, dim)


class _SumGradient(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradient, ctx.group), None


class _SumForward(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GatherReplicated(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dim: int, sizes: tuple[int, ...], group: dist.ProcessGroup
    ) -> torch.Tensor:
        rank = dist.get_rank(group)
        ctx.slice = (dim, sum(sizes[:rank]), sizes[rank])
        return _gather(tensor, dim, sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient.narrow(*ctx.slice), None, None, None


class _SplitReplicated(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dim: int, sizes: tuple[int, ...], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.arguments = (dim, sizes, group)
        rank = dist.get_rank(group)
        return tensor.narrow(dim, sum(sizes[:rank]), sizes[rank])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _gather(gradient, *ctx.arguments), None, None, None


class _GatherParts(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dim: int, group: dist.ProcessGroup, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.arguments = (dim, group, dtype)
        return _gather_equal(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        dim, group, dtype = ctx.arguments
        own = _sum_and_scatter(gradient.to(dtype), dim, group)
        return own.to(gradient.dtype), None, None, None


class _SumParts(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.arguments = (dim, group)
        return _sum_and_scatter(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gather_equal(gradient, *ctx.arguments), None, None


def _exchange(
    tensor: torch.Tensor, split_dim: int, join_dim: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Send slice i of `split_dim` to rank i; join what arrives along `join_dim`, in rank order."""
    num_ranks = dist.get_world_size(group)
    outgoing = torch.stack(tensor.chunk(num_ranks, split_dim)).contiguous()
    incoming = _arrived(funcol.all_to_all_single(outgoing, None, None, group))
    return torch.cat(incoming.view_as(outgoing).unbind(), join_dim)


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, split_dim: int, join_dim: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.arguments = (join_dim, split_dim, group)
        return _exchange(tensor, split_dim, join_dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(gradient, *ctx.arguments), None, None, None


def sum_gradient(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Identity whose gradient is summed over `group`: the entry of a column-split linear."""
    out: torch.Tensor = _SumGradient.apply(tensor, group)  # type: ignore[no-untyped-call]
    return out


def sum_over(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over `group`, gradient passed through: the exit of a row-split linear."""
    out: torch.Tensor = _SumForward.apply(tensor, group)  # type: ignore[no-untyped-call]
    return out


def gather_replicated(
    tensor: torch.Tensor, dim: int, sizes: tuple[int, ...], group: dist.ProcessGroup
) -> torch.Tensor:
    """Whole tensor from the ranks' slices, for work that every rank repeats alike."""
    out: torch.Tensor = _GatherReplicated.apply(tensor, dim, sizes, group)  # type: ignore[no-untyped-call]
    return out


def split_replicated(
    tensor: torch.Tensor, dim: int, sizes: tuple[int, ...], group: dist.ProcessGroup
) -> torch.Tensor:
    """This rank's slice of a tensor that every rank holds alike."""
    out: torch.Tensor = _SplitReplicated.apply(tensor, dim, sizes, group)  # type: ignore[no-untyped-call]
    return out


def gather_parts(
    tensor: torch.Tensor, dim: int, group: dist.ProcessGroup, *, sum_in: torch.dtype
) -> torch.Tensor:
    """Whole tensor from equal parts; the gradients that the ranks send back are summed.

    Args:
        tensor: this rank's part.
        dim: dim along which the parts follow each other.
        group: the ranks that hold them.
        sum_in: dtype in which gradients are summed.
    """
    out: torch.Tensor = _GatherParts.apply(tensor, dim, group, sum_in)  # type: ignore[no-untyped-call]
    return out


def sum_parts(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's equal part along `dim` of the sum over `group`; the reverse of `gather_parts`."""
    out: torch.Tensor = _SumParts.apply(tensor, dim, group)  # type: ignore[no-untyped-call]
    return out


def exchange(
    tensor: torch.Tensor, split_dim: int, join_dim: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """All-to-all: give up `split_dim`, receive the whole of `join_dim`."""
    out: torch.Tensor = _Exchange.apply(tensor, split_dim, join_dim, group)  # type: ignore[no-untyped-call]
    return out
