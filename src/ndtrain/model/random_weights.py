"""Random weights that do not depend on the mesh: each module draws from a seed of its own.

A module is made whole, initialised by the architecture's own rule and cut to this rank's part, one
after the other, so that no rank ever holds a whole model.
"""

import copy
import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ndtrain.model.names import plain_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def meta_twin(model: nn.Module) -> "PreTrainedModel":
    """The same architecture, plain, whole and on the meta device."""
    from transformers import PreTrainedModel

    original = next(part for part in model.modules() if isinstance(part, PreTrainedModel))
    architecture: Any = next(
        kind
        for kind in type(original).__mro__
        if issubclass(kind, PreTrainedModel) and not issubclass(kind, FSDPModule)
    )
    with torch.device("meta"):
        twin: PreTrainedModel = architecture._from_config(
            original.config, dtype=original.config.dtype or torch.float32
        )
    twin.tie_weights()
    return twin


def draw_weights(
    twin: "PreTrainedModel", *, seed: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and persistent buffer, whole, by name; one module is in memory at a time.

    Args:
        twin: from `meta_twin`.
        seed: the run's seed.
        device: where the values are drawn; another kind of device draws other values.
        dtype: of the drawn parameters.
    """
    for name, module in twin.named_modules():
        if not _own(module._parameters) and not _own(module._buffers):
            continue
        made = initialise(twin, name, module, seed=seed, device=device, dtype=dtype)
        for own, parameter in _own(made._parameters).items():
            yield _join(name, own), parameter.detach()
        for own, buffer in _own(made._buffers).items():
            if own not in made._non_persistent_buffers_set:
                yield _join(name, own), buffer


def restore_buffers(model: nn.Module, twin: "PreTrainedModel") -> None:
    """Fill the buffers that no checkpoint holds, e.g. rotary frequencies.

    Args:
        model: on its real device.
        twin: from `meta_twin`.
    """
    buffers = {plain_name(name): buffer for name, buffer in model.named_buffers()}
    for name, module in twin.named_modules():
        wanted = [own for own in _own(module._buffers) if own in module._non_persistent_buffers_set]
        if not wanted:
            continue
        made = initialise(
            twin, name, module, seed=0, device=torch.device("cpu"), dtype=torch.float32
        )
        values = _own(made._buffers)
        for own in wanted:
            target = buffers.get(_join(name, own))
            if target is not None:
                target.copy_(values[own])


@torch.no_grad()
def initialise(
    twin: "PreTrainedModel",
    name: str,
    module: nn.Module,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> nn.Module:
    """A copy of one module with real values of its own; its children stay on the meta device."""
    made = copy.copy(module)
    made._parameters = {
        own: nn.Parameter(
            torch.empty_like(one, device=device, dtype=dtype), requires_grad=one.requires_grad
        )
        if one is not None
        else None
        for own, one in module._parameters.items()
    }
    made._buffers = {
        own: torch.zeros_like(one, device=device) if one is not None else None
        for own, one in module._buffers.items()
    }
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_of(seed, name))
        twin._init_weights(made)
    return made


def seed_of(seed: int, name: str) -> int:
    """A seed for one named thing of a run."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def _own(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {name: one for name, one in tensors.items() if one is not None}


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
