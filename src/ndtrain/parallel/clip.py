"""The gradient's norm over tensors that live on different meshes, and clipping by it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from ndtrain.parallel.linear import local
from ndtrain.parallel.mesh import Mesh


@torch.no_grad()
def local_norms(parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
    """Norm, an fp32 scalar, of this rank's part of each gradient that there is."""
    gradients = {p: local(p.grad) for p in parameters if p.grad is not None}
    filled = {p: gradient for p, gradient in gradients.items() if gradient.numel()}
    if not filled:
        return {}
    norms = torch._foreach_norm(list(filled.values()), 2, dtype=torch.float32)
    return dict(zip(filled, norms, strict=True))


def _squares(norms: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.stack(list(norms)).square().sum() if norms else torch.zeros((), device=device)


def _is_split_over_tp(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == "tp" and not isinstance(placement, Replicate)
        for name, placement in zip(names, parameter.placements, strict=True)
    )


@torch.no_grad()
def sum_partial_gradients(parameters: Sequence[nn.Parameter], mesh: Mesh) -> None:
    """Sum the gradients of parameters that saw only this tp rank's part of the work.

    Once per step, after the last micro-batch, so that accumulated parts are not summed twice; in
    fp32, so that parts in bf16 are rounded once more only.
    """
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if mesh.plan.tp == 1 or not gradients:
        return
    flat = torch.cat([gradient.flatten().float() for gradient in gradients])
    dist.all_reduce(flat, group=mesh.tp_group)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


@torch.no_grad()
def gradient_norm(
    parameters: Sequence[nn.Parameter],
    mesh: Mesh,
    used_up: Mapping[nn.Parameter, torch.Tensor] = MappingProxyType({}),
) -> torch.Tensor:
    """The 2-norm of the whole gradient, the same fp32 scalar on every rank.

    Each element is counted once: shards are summed over the fsdp ranks, and what tensor
    parallelism splits also over tp. Everything is alike on the dp_replicate axis.

    Args:
        parameters: trained parameters, the same list on every rank.
        mesh: the mesh they live on.
        used_up: norms of this rank's part of the gradients that are gone already.
    """
    split: list[torch.Tensor] = []
    alike: list[torch.Tensor] = []
    norms = {**local_norms(parameters), **used_up}
    for parameter in parameters:
        if parameter in norms:
            (split if _is_split_over_tp(parameter) else alike).append(norms[parameter])
    squares = torch.stack([_squares(split, mesh.device), _squares(alike, mesh.device)])
    dist.all_reduce(squares, group=mesh.fsdp_group)
    if mesh.plan.tp > 1:
        over_tp = squares[:1].clone()
        dist.all_reduce(over_tp, group=mesh.tp_group)
        squares = torch.cat([over_tp, squares[1:]])
    return squares.sum().sqrt()


@torch.no_grad()
def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of the common norm `norm` are scaled by, so that it is at most `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def scale_gradients(parameters: Sequence[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply all gradients by a scalar on the device."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    torch._foreach_mul_([gradient for gradient in gradients if gradient.numel()], factor)
