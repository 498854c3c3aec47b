"""One optimizer step, and one evaluation: the same numbers on every mesh."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ndtrain.data.batch import MicroBatch, StepBatch
from ndtrain.model.trained_tokens import trained_places
from ndtrain.parallel.clip import (
    clip_factor,
    gradient_norm,
    scale_gradients,
    sum_partial_gradients,
)
from ndtrain.parallel.context import split_rows
from ndtrain.train.assemble import Engine
from ndtrain.train.low_bit_adam import LowBitAdamW
from ndtrain.train.optim import set_learning_rate

_PLACES_ON_CUDA = 512
"""Tokens with losses are rounded up to a multiple: few sizes of products and of memory."""


@dataclass(frozen=True)
class StepResult:
    """What a step computed, on the device, the same on every rank.

    Attributes:
        loss: sum of token losses over the trained tokens of the whole step.
        grad_norm: norm of the whole gradient before clipping.
        local_loss: this rank's own share of the loss sum.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    local_loss: torch.Tensor


def micro_batch_loss(engine: Engine, micro: MicroBatch, step: int) -> torch.Tensor:
    """Sum of the token losses of this rank's part of a micro-batch."""
    part, rows = split_rows(micro, engine.split, segmented=engine.policy.segmented)
    device = engine.mesh.device
    on_cuda = device.type == "cuda"
    places = trained_places(part.targets, multiple=_PLACES_ON_CUDA if on_cuda else 1)
    if on_cuda:
        # from pinned memory, so that the copies wait for nothing that still runs
        part, rows = part.pinned(), rows.pinned()
        places = None if places is None else places.pin_memory()
    part, rows = part.to(device), rows.to(device)
    places = None if places is None else places.to(device, non_blocking=True)
    if engine.block_windows:
        rows = rows.with_blocks(engine.block_windows)
    columns = engine.split.columns(micro.input_ids.shape[1], engine.split.rank, device)
    engine.keys.set(engine.recipe.seed, step, part.row_ids, columns)
    loss: torch.Tensor = engine.trainable(part, rows, places)
    return loss


def accumulate_gradients(engine: Engine, batch: StepBatch, step: int, factor: float) -> StepResult:
    """Forward and backward over all micro-batches; gradients are left on the parameters.

    With an optimizer in the backward pass they are used up already, all but those of
    `engine.partial`.

    Args:
        engine: the model on its mesh.
        batch: this rank's rows, with the counts of the whole step.
        step: steps done before this one.
        factor: share of the peak learning rate.
    """
    set_learning_rate(engine.optimizer, factor)
    if engine.early is not None:
        engine.early.begin()
    scale = 1.0 / max(1, batch.num_targets)
    total = torch.zeros((), device=engine.mesh.device)
    for number, micro in enumerate(batch.micro):
        loss = micro_batch_loss(engine, micro, step)
        engine.sync.at(number, len(batch.micro))
        torch.autograd.backward(loss * scale)
        total += loss.detach()
    local_loss = total.clone()
    dist.all_reduce(total, group=engine.mesh.loss)
    sum_partial_gradients(engine.partial, engine.mesh)
    used_up = engine.early.norms if engine.early is not None else {}
    norm = gradient_norm(engine.parameters, engine.mesh, used_up)
    return StepResult(total * scale, norm, local_loss)


def update(engine: Engine, result: StepResult) -> None:
    """Clip, move the parameters and clear the gradients.

    Args:
        engine: the model on its mesh.
        result: the step's norm.
    """
    if engine.recipe.max_grad_norm is not None:
        factor = clip_factor(result.grad_norm, engine.recipe.max_grad_norm)
        if isinstance(engine.optimizer, LowBitAdamW):
            # scaled where it is read, gradients in bf16 are not rounded once more
            engine.optimizer.gradient_factor = factor
        else:
            scale_gradients(engine.parameters, factor)
    engine.optimizer.step()
    engine.optimizer.zero_grad(set_to_none=True)


def discard_gradients(engine: Engine) -> None:
    """Forget a step's gradients."""
    engine.optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def evaluation_loss(engine: Engine, batches: Iterable[StepBatch]) -> tuple[float, int]:
    """Loss over the trained tokens of all batches, and their number.

    Args:
        engine: the model on its mesh.
        batches: this rank's share of the held-out rows; every rank has equally many.
    """
    engine.trainable.eval()
    total = torch.zeros((), dtype=torch.float64, device=engine.mesh.device)
    tokens = 0
    for batch in batches:
        for micro in batch.micro:
            total += micro_batch_loss(engine, micro, 0).double()
        tokens += batch.num_targets
    engine.trainable.train()
    dist.all_reduce(total, group=engine.mesh.loss)
    return total.item() / max(1, tokens), tokens
