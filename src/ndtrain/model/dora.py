"""DoRA (Liu et al. 2024) on linears that tensor parallelism has split.

A weight is a length for each output row times a direction; the adapter moves the direction. The
length of W + s B A is found without ever building B A: its square is a sum over input features,
|W|^2 + 2 s (W A^T) B + s^2 (B (A A^T)) B per row, so that ranks with a share of the features add
their parts.

Shape letters: O output features, I input features, R rank of the adapter.
"""

from typing import Any

import torch
from peft.tuners.lora.layer import LoraVariant
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ndtrain.parallel.collectives import sum_over
from ndtrain.parallel.linear import chunk_sizes, local


class MeshDora(LoraVariant):  # type: ignore[misc]
    """peft's hook for what an adapted linear computes."""

    @staticmethod
    def forward(
        module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """The output of the adapted linear.

        Args:
            module: the adapted linear.
            active_adapter: name of the adapter.
            x: input [..., I], this rank's features when they are split.
            result: output of the base [..., O], this rank's features when they are split.
            _: nothing else is used.
        """
        first, second = module.lora_A[active_adapter], module.lora_B[active_adapter]
        dropout, scaling = module.lora_dropout[active_adapter], module.scaling[active_adapter]
        magnitude = module.lora_magnitude_vector[active_adapter].weight
        base = module.get_base_layer()
        inputs = dropout(x.to(first.weight.dtype))
        directed = result
        if not isinstance(dropout, nn.Identity) and module.training:
            directed = base(inputs.to(x.dtype))
        if base.bias is not None:
            directed = directed - local(base.bias)
        lengths = row_lengths(base.weight, first.weight, second.weight, scaling)
        scale = _own_rows(magnitude, base.weight) / lengths.to(magnitude.dtype)
        gained = second(first(inputs)) * scaling
        added: torch.Tensor = (scale - 1) * directed + scale * gained
        return result + added.to(result.dtype)


@torch.no_grad()
def row_lengths(
    weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Lengths of this rank's rows of W + s B A, in fp32; no gradient flows, as in the paper.

    Args:
        weight: W [O, I], split along either dim or whole.
        first: A [R, I].
        second: B [O, R].
        scaling: s.
    """
    own, a, b = local(weight), local(first).float(), local(second).float()
    squares: torch.Tensor = torch.linalg.vector_norm(own, dim=1, dtype=torch.float32).square()
    crossed = (own.to(a.dtype) @ a.T * b).sum(1)
    gained = (b @ (a @ a.T) * b).sum(1)
    total = squares + 2 * scaling * crossed + scaling**2 * gained
    if isinstance(weight, DTensor) and _split_dim(weight) == 1:
        total = sum_over(total, weight.device_mesh.get_group())
    return total.clamp_min(0).sqrt()


def _own_rows(magnitude: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The lengths of the output rows that this rank computes."""
    if isinstance(weight, DTensor) and _split_dim(weight) == 0:
        sizes = chunk_sizes(weight.shape[0], weight.device_mesh.size())
        rank = weight.device_mesh.get_local_rank()
        return magnitude.narrow(0, sum(sizes[:rank]), sizes[rank])
    return magnitude


def _split_dim(weight: DTensor) -> int | None:
    (placement,) = weight.placements
    return placement.dim if isinstance(placement, Shard) else None


def use_mesh_dora(model: nn.Module) -> None:
    """Let every DoRA linear compute in a way that can be split, in place."""
    for module in model.modules():
        variants = getattr(module, "lora_variant", None)
        base = getattr(module, "base_layer", None)
        if variants and isinstance(base, nn.Linear):
            for name in variants:
                variants[name] = MeshDora()
