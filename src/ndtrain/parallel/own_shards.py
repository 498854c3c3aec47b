"""One rank computes with the shards it has: there is nothing to gather, so nothing is copied.

FSDP gathers over one rank too: it casts every parameter and copies it to where gathered ones lie,
and copies every gradient twice on its way back. Its extension points let a shard say itself what
is computed with: the shard, or, where it is computed in another dtype, one copy.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ndtrain.parallel.linear import local

_CAST_ALONE = 1 << 20
"""Elements from which casting a gradient takes longer than launching the kernel that does."""


def use_own_shards(model: nn.Module, *, gradients: bool) -> None:
    """Compute with shards in place of gathered copies; over one rank only, after loading.

    Args:
        model: the sharded module, its weights in place: the tensors that hold them are kept.
        gradients: put gradients on the parameters as they arrive, not by way of FSDP's buffers;
            FSDP's way also calls what was registered with the parameters.
    """
    seen: set[nn.Parameter] = set()
    # inner units first: what is inside them is theirs
    for unit in reversed(list(model.modules())):
        if not isinstance(unit, FSDPModule):
            continue
        own = [p for p in unit.parameters() if isinstance(p, DTensor) and p not in seen]
        seen.update(own)
        copies = _Copies()
        for parameter in own:
            shard = parameter._local_tensor  # where FSDP looks for extensions
            if type(shard) is torch.Tensor and shard.is_floating_point():
                copies.stand_in_for_gathering(shard)
        if gradients:
            _take_gradients(unit, own, copies)


def _nothing() -> None:
    pass


class _Copies:
    """What one unit computes with. FSDP asks for all its parameters, then takes them one by one."""

    def __init__(self) -> None:
        self.when_asked: Callable[[], None] = _nothing
        """Called when a pass begins to use the unit."""
        self._asked = 0
        self._targets: list[torch.Tensor] = []
        self._shards: list[torch.Tensor] = []

    def stand_in_for_gathering(self, shard: torch.Tensor) -> None:
        """Hook a shard into FSDP's all-gather extensions."""
        nothing = shard.new_empty(0)
        # the hooks lie on the tensor itself: a strong reference would keep it for ever
        own = weakref.ref(shard)
        shard.fsdp_pre_all_gather = partial(self._ask, nothing)  # type: ignore[attr-defined]
        shard.fsdp_post_all_gather = partial(self._give, own)  # type: ignore[attr-defined]

    def _ask(self, nothing: torch.Tensor, _mesh: object) -> tuple[tuple[torch.Tensor, ...], None]:
        if self._asked == 0:
            self.when_asked()
        self._asked += 1
        return (nothing,), None

    def _give(
        self,
        own: "weakref.ref[torch.Tensor]",
        _gathered: tuple[torch.Tensor, ...],
        _metadata: None,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        shard = own()
        assert shard is not None
        given, freed = shard, list[torch.Tensor]()
        if shard.dtype != dtype:
            given = torch.empty_like(shard, dtype=dtype) if out is None else local(out)
            freed.append(given)
            self._targets.append(given)
            self._shards.append(shard)
        self._asked -= 1
        if self._asked == 0:
            self._fill()
        return (given, tuple(freed)) if out is None else None

    def _fill(self) -> None:
        """Cast all of the unit's parameters at once: adapters are hundreds of small ones."""
        targets, shards = self._targets, self._shards
        self._targets, self._shards = [], []
        if targets:
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(targets)):
                torch._foreach_copy_(targets, shards)


class _Gradients:
    """Hands a unit's gradients to its parameters. FSDP takes those that are not handed over.

    Args:
        small: parameters whose gradients are small and have to be cast: all at once, when the last
            of them is there. Where some do not arrive, as of experts that no token went to, FSDP
            finds the others where autograd left them.
    """

    def __init__(self, small: int) -> None:
        self._small = small
        self._waiting: list[tuple[nn.Parameter, torch.Tensor]] = []

    def begin(self) -> None:
        """Forget what the last pass left to FSDP."""
        self._waiting = []

    @torch.no_grad()
    def take(self, parameter: nn.Parameter, computed: torch.Tensor) -> None:
        """Take the gradient of what is computed with at once."""
        assert computed.grad is not None
        gradient, computed.grad = computed.grad.to(parameter.dtype), None
        _add_gradient(parameter, gradient)

    @torch.no_grad()
    def wait(self, parameter: nn.Parameter, computed: torch.Tensor) -> None:
        """Take the gradient together with those of the other small ones."""
        self._waiting.append((parameter, computed))
        if len(self._waiting) < self._small:
            return
        # FSDP may have taken some already
        waiting = [(one, found.grad, found) for one, found in self._waiting]
        self._waiting = []
        there = [(one, grad, found) for one, grad, found in waiting if grad is not None]
        cast = [torch.empty_like(grad, dtype=one.dtype) for one, grad, _ in there]
        torch._foreach_copy_(cast, [grad for _, grad, _ in there])
        for (one, _, found), gradient in zip(there, cast, strict=True):
            found.grad = None
            _add_gradient(one, gradient)


def _add_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    assert isinstance(parameter, DTensor)
    if parameter.grad is not None:
        local(parameter.grad).add_(gradient)
        return
    parameter.grad = DTensor.from_local(
        gradient,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _take_gradients(unit: FSDPModule, parameters: Iterable[nn.Parameter], copies: _Copies) -> None:
    """Hand gradients of what is computed with to the parameters themselves."""
    assert isinstance(unit, nn.Module)
    places = {
        parameter: (module, name)
        for module in unit.modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    unit.unshard()
    trained = [
        (parameter, getattr(module, name))
        for parameter in parameters
        if parameter.requires_grad
        for module, name in [places[parameter]]
    ]
    plain = [(one, computed) for one, computed in trained if not isinstance(computed, DTensor)]
    small = [one for one, computed in plain if _is_cast_with_others(one, computed)]
    gradients = _Gradients(len(small))
    copies.when_asked = gradients.begin
    for parameter, computed in plain:
        together = _is_cast_with_others(parameter, computed)
        hook = gradients.wait if together else gradients.take
        computed.register_post_accumulate_grad_hook(partial(hook, parameter))
    unit.reshard()


def _is_cast_with_others(parameter: nn.Parameter, computed: torch.Tensor) -> bool:
    return parameter.dtype != computed.dtype and parameter.numel() < _CAST_ALONE
