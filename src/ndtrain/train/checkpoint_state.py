"""Which tensors a checkpoint holds, under names that do not depend on the mesh."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from ndtrain.errors import CheckpointError
from ndtrain.model.regions import local_region, region_of, take_region
from ndtrain.model.trainable import Trainable
from ndtrain.model.whole import whole_of

MODEL, OPTIMIZER, GENERATOR = "model", "optimizer", "generator"

_WRAPPER_PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    """A parameter's name without the parts that compilation or recomputation put in."""
    for part in _WRAPPER_PARTS:
        name = name.replace(part, "")
    return name


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by clean name; tied ones once, under their first name, on every mesh."""
    for name, parameter in _inner(model).named_parameters():
        yield clean_name(name), parameter


def _inner(model: nn.Module) -> nn.Module:
    """The module whose names count: what is trained may wrap it together with its loss."""
    return model.model if isinstance(model, Trainable) else model


def model_tensors(model: nn.Module, *, trained_only: bool) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers to save or to load into.

    Args:
        model: the outermost module, so that everything gathered in it can be sharded again.
        trained_only: leave frozen parameters out (the base of an adapter is on disk already).
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # An evaluation may have left gathered weights in place of the sharded ones.
            module.reshard()
    tensors = {
        name: parameter.detach()
        for name, parameter in named_parameters(model)
        if parameter.requires_grad or not trained_only
    }
    if not trained_only:
        tensors.update(_persistent_buffers(model))
    return {f"{MODEL}.{name}": tensor for name, tensor in tensors.items()}


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    buffers = {}
    for prefix, module in _inner(model).named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffers[clean_name(f"{prefix}.{name}" if prefix else name)] = buffer
    return buffers


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """The optimizer's states by parameter name, independent of its parameter groups.

    Call `model_tensors` first: it brings gathered parameters back to their sharded form.

    Hyperparameters are left out: the recipe and the schedule give them anew.
    Plain numbers become tensors without dimensions, so that nothing needs pickle.
    """
    tensors = {}
    unnamed = set(optimizer.state)
    for name, parameter in named_parameters(model):
        unnamed.discard(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            full = f"{OPTIMIZER}.{name}.{key}"
            if isinstance(value, torch.Tensor):
                tensors[full] = value.detach()
            elif isinstance(value, (int, float)):
                tensors[full] = torch.tensor(value, dtype=_number_dtype(value))
            elif value is not None:
                raise CheckpointError(
                    f"The optimizer keeps a {type(value).__name__} under '{key}', which cannot "
                    "be saved.",
                    where=f"optimizer: {type(optimizer).__name__}",
                    hint="Use an optimizer whose states are tensors or numbers.",
                )
    if unnamed:
        # Saving on would lose them without a word.
        raise CheckpointError(
            f"{len(unnamed)} optimizer states belong to no parameter of the model.",
            where=f"optimizer: {type(optimizer).__name__}",
            hint="This is a defect of ndtrain: the model was not sharded again before the save.",
        )
    return tensors


def put_numbers_back(
    model: nn.Module, optimizer: torch.optim.Optimizer, loaded: Mapping[str, torch.Tensor]
) -> None:
    """Write loaded plain numbers into the optimizer; its tensors were loaded in place."""
    for name, parameter in named_parameters(model):
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, (int, float)):
                state[key] = type(value)(loaded[f"{OPTIMIZER}.{name}.{key}"].item())


def _number_dtype(value: int | float) -> torch.dtype:
    return torch.float64 if isinstance(value, float) else torch.int64


def create_optimizer_states(optimizer: torch.optim.Optimizer) -> None:
    """Let a fresh optimizer make its states, by a step that changes no parameter.

    Gradients are zero and so are the learning rates, decay included.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if torch.is_tensor(group["lr"]) else 0.0
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def generator_tensors(rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's random generators of this rank, as byte tensors."""
    states = {f"{GENERATOR}.cpu.{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{GENERATOR}.cuda.{rank}"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: Mapping[str, torch.Tensor], rank: int, device: torch.device) -> None:
    """Set the generators from what `generator_tensors` saved for this rank."""
    if (state := states.get(f"{GENERATOR}.cpu.{rank}")) is not None:
        torch.set_rng_state(state)
    if (state := states.get(f"{GENERATOR}.cuda.{rank}")) is not None:
        torch.cuda.set_rng_state(state, device)


def as_blocks(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with every shard one contiguous block of the whole.

    torch.distributed.checkpoint describes a shard by one offset and one size. Fused gate-and-up
    weights under tensor parallelism are two blocks a rank, which it would write, and read, in the
    wrong place without a word.
    """
    return {
        name: _with_plain_shards(tensor) if is_scattered(tensor) else tensor
        for name, tensor in tensors.items()
    }


def copy_from_blocks(
    tensors: Mapping[str, torch.Tensor], blocks: Mapping[str, torch.Tensor]
) -> None:
    """Bring what was loaded into `as_blocks(tensors)` back into `tensors`."""
    for name, tensor in tensors.items():
        block = blocks[name]
        if block is not tensor and isinstance(tensor, DTensor) and isinstance(block, DTensor):
            part = take_region(whole_of(block), region_of(tensor))
            if part is not None:
                tensor.to_local().copy_(part)


def is_scattered(tensor: torch.Tensor) -> bool:
    """Whether a rank's shard is not the one block of the whole tensor that torch takes it for.

    Sharding a dim that tensor parallelism already divides is strided by exactly the number of
    later shards; any other stride means interleaved blocks. Where the dim does not divide, torch
    works out other places than the ones that sharding gives the ranks.
    """
    if not isinstance(tensor, DTensor):
        return False
    placements = tensor.placements
    for axis, placement in enumerate(placements):
        strided = _stride_of(placement)
        if strided is None:
            continue
        dim, stride = strided
        splitting = [other for other, place in enumerate(placements) if _splits(place, dim)]
        sizes = {other: tensor.device_mesh.size(other) for other in splitting}
        if stride != math.prod(size for other, size in sizes.items() if other > axis):
            return True
        if tensor.shape[dim] % math.prod(sizes.values()):
            return True
    return False


def _splits(placement: Any, dim: int) -> bool:
    return placement.is_shard(dim) or (_stride_of(placement) or (None,))[0] == dim


def _stride_of(placement: Any) -> tuple[int, int] | None:
    """Dim and stride of a strided shard; its class is private to torch, its fields are not."""
    if not hasattr(placement, "split_factor"):
        return None
    return placement.dim, placement.split_factor


def _with_plain_shards(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    placements: list[Any] = [
        Shard(strided[0]) if (strided := _stride_of(placement)) else placement
        for placement in tensor.placements
    ]
    mesh = tensor.device_mesh
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    whole = whole_of(tensor)
    region = local_region(tensor.shape, placements, mesh.shape, coordinates)
    part = take_region(whole, region)
    return DTensor.from_local(
        whole.new_empty(region.shape) if part is None else part.clone(),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the whole tensors, over all ranks (a DTensor's size is that of the whole)."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
