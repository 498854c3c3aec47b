"""Turns the sharded model of a run into a folder that transformers or peft loads, on any mesh.

Tensors are gathered on the main rank one at a time; the optimizer is not touched. Every rank takes
part in every collective, even when the main rank has failed to write: the failure is told to all
at the end.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ndtrain.errors import CheckpointError, NdtrainError
from ndtrain.model.adapter_files import adapter_names, check_adapter, write_adapter
from ndtrain.model.key_map import to_file_tensors
from ndtrain.model.model_folder import (
    appearing_folder,
    base_dtype,
    check_free_space,
    plan_files,
    write_side_files,
)
from ndtrain.model.names import parse_name
from ndtrain.model.random_weights import meta_twin
from ndtrain.model.shard_files import ShardFiles
from ndtrain.parallel.runtime import Runtime
from ndtrain.plan.model_source import ModelSource
from ndtrain.train.gather import Gather

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def export_model(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase | None",
    source: ModelSource,
    dest: Path,
    *,
    runtime: Runtime,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 2**30,
) -> None:
    """Write the whole of `model` to `dest`; every rank calls it.

    Args:
        model: sharded, possibly split.
        tokenizer: the run's, with its chat template.
        source: the base model.
        dest: replaced in one step when everything is written.
        runtime: this rank.
        dtype: of the stored weights; None: the base model's.
        shard_bytes: largest weight file.

    Raises:
        CheckpointError: on every rank, when the main rank cannot write.
    """

    def write(gather: Gather) -> None:
        twin = meta_twin(model)
        stored = dtype or base_dtype(source)
        plan = plan_files(twin, (parse_name(name).base for name in gather.names), stored)
        check_free_space(dest, plan.nbytes)
        with appearing_folder(dest) as folder:
            write_side_files(folder, twin, source, tokenizer, stored)
            with ShardFiles(folder, plan.specs, shard_bytes=shard_bytes) as files:
                for name in gather.names:
                    whole = gather.take(name)
                    for key, tensor in to_file_tensors(twin, parse_name(name).base, whole).items():
                        files.write(key, [tensor])

    _gather_and_write(model, Gather(model), write, dest, runtime)


def export_adapter(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase | None",
    source: ModelSource,
    dest: Path,
    *,
    runtime: Runtime,
    trained: bool = True,
) -> None:
    """Write what was trained of an adapted `model` to `dest`; every rank calls it.

    Args:
        model: sharded, possibly split; its frozen base is not gathered.
        tokenizer: the run's, with its chat template.
        source: the base model.
        dest: replaced in one step when everything is written.
        runtime: this rank.
        trained: steps were taken, so no factor may still be zero.

    Raises:
        CheckpointError: on every rank, when the main rank cannot write or the adapter is broken.
    """

    def write(gather: Gather) -> None:
        names = adapter_names(model)
        tensors = {name: gather.take(name).to("cpu", copy=True) for name in gather.names}
        check_adapter(tensors, trained=trained)
        with appearing_folder(dest) as folder:
            config = getattr(model, "peft_config", {}).get("default")
            write_adapter(folder, tensors, names, config, source)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(folder))

    _gather_and_write(model, Gather(model, trained_only=True), write, dest, runtime)


@torch.no_grad()
def _gather_and_write(
    model: nn.Module,
    gather: Gather,
    write: Callable[[Gather], None],
    dest: Path,
    runtime: Runtime,
) -> None:
    """Let the main rank write while all ranks gather."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    failure: NdtrainError | None = None
    try:
        if runtime.is_main:
            write(gather)
    except NdtrainError as error:
        failure = error
    finally:
        gather.finish()
    agree(failure, dest)


def agree(failure: NdtrainError | None, place: Path) -> None:
    """Raise the main rank's failure on every rank, so that none waits for the others."""
    told = [None if failure is None else str(failure)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(told, src=0)
    if failure is not None:
        raise failure
    if told[0] is not None:
        raise CheckpointError(f"rank 0 failed: {told[0]}", where=str(place))
