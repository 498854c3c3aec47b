"""Fully sharded data parallelism (FSDP2, with copies: HSDP), always applied, also over one rank.

One code path for every mesh: all parameters become DTensors, so optimizer, clipping and
checkpoints need to know one kind of tensor only. Gradients are summed, not averaged: the loss is
already divided by the trained tokens of the whole step.
"""

from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ndtrain.parallel.mesh import Mesh


def apply_sharding(
    model: nn.Module,
    units: Sequence[nn.Module],
    mesh: Mesh,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype = torch.float32,
    reshard: bool = True,
    whole: Collection[nn.Parameter] = (),
) -> None:
    """Shard every parameter of `model` over the mesh's fsdp ranks, in place.

    Args:
        model: the module whose forward pass is one whole micro-batch.
        units: modules gathered one at a time, in the order in which they run; what is left
            belongs to `model` itself.
        mesh: the mesh; with dp_replicate > 1 the shards are repeated over it.
        compute_dtype: parameters are cast to it for the forward and backward pass.
        reduce_dtype: gradients are cast to it to be summed over ranks.
        reshard: free gathered units between forward and backward; the last one is kept, because
            the backward pass begins with it.
        whole: frozen parameters that every rank holds whole, in the dtype they are computed in.
    """
    # one rank has nothing to sum: its gradients are not converted on the way
    alone = mesh.plan.is_alone
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=compute_dtype if alone else reduce_dtype,
        cast_forward_inputs=False,
    )
    left_out = set(whole)

    def shard(module: nn.Module, frees: bool) -> None:
        fully_shard(
            module,
            mesh=mesh.fsdp,
            mp_policy=policy,
            reshard_after_forward=frees,
            ignored_params=left_out,
        )

    for number, unit in enumerate(units):
        shard(unit, reshard and number + 1 < len(units))
        # a module may be reached on a second way, outside its unit
        left_out.update(unit.parameters())
    shard(model, False)
    if not alone:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    _prefetch(units)


def _prefetch(units: Sequence[nn.Module]) -> None:
    """Gather the next unit while one is computed, two ahead in the backward pass.

    Named outright, so that the order does not hang on how far the host is ahead.
    """
    chain: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for number, unit in enumerate(chain):
        following = chain[number + 1 : number + 2]
        earlier = chain[max(0, number - 2) : number][::-1]
        if following:
            unit.set_modules_to_forward_prefetch(following)
        if earlier:
            unit.set_modules_to_backward_prefetch(earlier)


class GradientSync:
    """When the gradients of a step's micro-batches are summed over the ranks that share its rows.

    Copies of the shards (HSDP) are summed with the last micro-batch only, which costs nothing:
    until then each rank adds up what its shards have. To sum the shards themselves once as well,
    every rank adds up gradients of whole parameters, in fp32.

    Args:
        model: the sharded module.
        each: sum shards with every micro-batch, as their gradients arrive.
        copies_too: sum copies with every micro-batch as well. What waits to be summed is kept as
            it will be sent, so that sums in bf16 would add up micro-batches in bf16.
    """

    def __init__(self, model: nn.Module, *, each: bool, copies_too: bool = False) -> None:
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._each = each
        self._never_waits = each and copies_too

    def at(self, number: int, count: int) -> None:
        """Prepare for the backward pass of micro-batch `number` of `count`."""
        if self._never_waits or count == 1 or 0 < number < count - 1:
            return  # as it was
        last = number == count - 1
        for unit in self._units:
            if self._each:
                unit.set_requires_all_reduce(last, recurse=False)
            else:
                unit.set_requires_gradient_sync(last, recurse=False)
