"""Random weights that do not depend on the mesh: each module draws from a seed of its own.

A module is made whole, initialised by the architecture's own rule and cut to this rank's part, one
after the other, so that no rank ever holds a whole model.
"""

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from ndtrain.errors import MeshError
from ndtrain.model.names import plain_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SMALL = 2**16
"""Elements up to which a tensor is built for its first values."""


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
    """A copy of one module with real values of its own; its children stay on the meta device.

    The architecture's rule may set a module's values where it meets a module around it, or leave
    them as they were built.

    Raises:
        MeshError: no rule sets a tensor, and it is too large to be built.
    """
    made = copy.copy(module)
    made._parameters = {
        own: nn.Parameter(_blank(one, device, dtype), requires_grad=one.requires_grad)
        if one is not None
        else None
        for own, one in module._parameters.items()
    }
    made._buffers = {
        own: _blank(one, device, one.dtype) if one is not None else None
        for own, one in module._buffers.items()
    }
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_of(seed, name))
        twin._init_weights(made)
        has_blanks = bool(_left_blank(made))
        if has_blanks:
            _initialise_around(twin, name, made)
    if has_blanks and _left_blank(made):
        _take_built(twin, name, made)
    return made


def _blank(like: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Memory in which it shows whether it was written; zeros where no value can show it."""
    made = torch.zeros_like(like, device=device, dtype=dtype)
    mark = _mark(dtype)
    return made if mark is None else made.fill_(mark)


def _mark(dtype: torch.dtype) -> float | int | None:
    """A value that no architecture starts from."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return None if dtype == torch.bool else torch.iinfo(dtype).max


def _left_blank(module: nn.Module) -> list[str]:
    """The module's own tensors of which something was never written."""
    own = _own(module._parameters) | _own(module._buffers)
    return [name for name, tensor in own.items() if _shows_mark(tensor)]


def _shows_mark(tensor: torch.Tensor) -> bool:
    mark = _mark(tensor.dtype)
    if mark is None:
        return False
    marked = tensor == mark if isinstance(mark, int) else tensor.isnan()
    return bool(marked.any())


def _initialise_around(twin: "PreTrainedModel", name: str, made: nn.Module) -> None:
    """Apply the architecture's rule to the modules around one, from the inside out."""
    path = name.split(".") if name else []
    child = made
    while path and _left_blank(made):
        own = path.pop()
        outer = copy.copy(twin.get_submodule(".".join(path)))
        outer._modules = {**outer._modules, own: child}
        twin._init_weights(outer)
        child = outer


def _take_built(twin: "PreTrainedModel", name: str, made: nn.Module) -> None:
    """Give tensors that no rule sets the values that their module was built with."""
    built = _build_small(twin).get_submodule(name)
    values = _own(built._parameters) | _own(built._buffers)
    tensors = _own(made._parameters) | _own(made._buffers)
    for own in _left_blank(made):
        value = values[own]
        if value.is_meta or _shows_mark(value):
            raise MeshError(
                f"the architecture '{twin.config.model_type}' has no rule for the first values of "
                f"'{_join(name, own)}'.",
                where="base_model",
                hint="Use a base_model with weights, or another architecture.",
            )
        tensors[own].copy_(value)


class _SmallOnHost(TorchFunctionMode):
    """Inside a meta device: small tensors get real values, as their constructor says."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a small tensor that is made out of nothing again, on the host."""
        keys = kwargs or {}
        made = func(*args, **keys)
        from_tensors = any(isinstance(one, torch.Tensor) for one in (*args, *keys.values()))
        if not isinstance(made, torch.Tensor) or not made.is_meta or from_tensors:
            return made
        # an empty tensor is how transformers asks which device it builds on
        if not 0 < made.numel() <= _SMALL or keys.get("device") is not None:
            return made
        host = torch.device("cpu")
        if func.__name__.startswith("empty"):
            return _blank(made, host, made.dtype)
        return func(*args, **{**keys, "device": host})


def _build_small(twin: "PreTrainedModel") -> nn.Module:
    """The same architecture as built, before any rule; what is not small stays on meta."""
    architecture: Any = type(twin)
    with torch.random.fork_rng(devices=[]), torch.device("meta"), _SmallOnHost():
        torch.manual_seed(0)
        built: nn.Module = architecture._from_config(twin.config, dtype=torch.float32)
    return built


def seed_of(seed: int, name: str) -> int:
    """A seed for one named thing of a run."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def _own(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {name: one for name, one in tensors.items() if one is not None}


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
