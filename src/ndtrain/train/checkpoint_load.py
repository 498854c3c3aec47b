"""Filling model and optimizer from a checkpoint, on any mesh."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from ndtrain.errors import CheckpointError
from ndtrain.parallel.runtime import Runtime
from ndtrain.train import checkpoint_state as state
from ndtrain.train import checkpoint_store as store
from ndtrain.train.checkpoint_files import FoundCheckpoint

T = TypeVar("T")


def agree(action: Callable[[], T], group: dist.ProcessGroup, *, is_main: bool) -> T:
    """Run `action` on the main rank and hand its result, or its failure, to every rank.

    Raises:
        CheckpointError: what the main rank raised.
    """
    outcome: list[Any] = [None, None]
    if is_main:
        try:
            outcome[0] = action()
        except CheckpointError as error:
            outcome[1] = (error.message, error.where, error.hint)
        except OSError as error:
            where = str(error.filename or "")
            outcome[1] = (f"The disk failed: {error.strerror}.", where, "Check it and run again.")
    dist.broadcast_object_list(outcome, group_src=0, group=group)
    if outcome[1] is not None:
        message, where, hint = outcome[1]
        raise CheckpointError(message, where=where, hint=hint)
    return cast(T, outcome[0])


def load_tensors(
    found: FoundCheckpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    runtime: Runtime,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill model, optimizer and generators from `found`; without optimizer only the model.

    Raises:
        CheckpointError: the checkpoint holds other tensors, or cannot be read.
    """
    tensors = state.model_tensors(model, trained_only=bool(found.meta.get("trained_only")))
    if optimizer is not None:
        state.create_optimizer_states(optimizer)
        tensors |= state.optimizer_tensors(model, optimizer)
    stored = store.shapes(found.path)
    _check_same_tensors(tensors, stored, found.path)
    generators = {
        name: value
        for name, value in state.generator_tensors(runtime.rank, runtime.device).items()
        # Another world size has other ranks; their generators start from the seed.
        if optimizer is not None and stored.get(name) == value.shape
    }
    blocks = state.as_blocks(tensors)
    store.read_tensors(blocks | generators, found.path, group)
    state.copy_from_blocks(tensors, blocks)
    if optimizer is not None:
        state.put_numbers_back(model, optimizer, blocks)
        state.restore_generators(generators, runtime.rank, runtime.device)


def _check_same_tensors(
    wanted: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Size], path: Path
) -> None:
    missing = [name for name in wanted if name not in stored]
    reshaped = [
        f"{name} is {tuple(stored[name])} in it and {tuple(tensor.shape)} in the model"
        for name, tensor in wanted.items()
        if name in stored and stored[name] != tensor.shape
    ]
    unused = [name for name in stored if name.startswith(f"{state.MODEL}.") and name not in wanted]
    problems = [
        *(f"it has no {name}" for name in missing[:3]),
        *reshaped[:3],
        *(f"the model has no {name}" for name in unused[:3]),
    ]
    if problems:
        raise CheckpointError(
            f"This checkpoint is of another model or optimizer: {'; '.join(problems)} "
            f"({len(missing) + len(reshaped) + len(unused)} differences).",
            where=str(path),
            hint="Undo the change of the recipe, or start over with --restart.",
        )
