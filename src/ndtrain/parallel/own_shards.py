"""One rank computes with the shards it has: there is nothing to gather, so nothing is copied.

FSDP gathers over one rank too: it casts every parameter and copies it to where gathered ones lie,
and copies every gradient twice on its way back. Its extension points let a shard say itself what
is computed with: the shard, or, where it is computed in another dtype, one copy.
"""

import weakref
from collections.abc import Collection
from functools import partial

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ndtrain.parallel.linear import local

_CAST_ALONE = 1 << 20
"""Elements from which casting a gradient takes longer than launching the kernel that does."""


def use_own_shards(model: nn.Module) -> None:
    """Compute with shards in place of gathered copies; over one rank only, after loading.

    Gradients are put on the parameters as they arrive, not by way of FSDP's buffers; as there, what
    was registered with the parameters is called then.

    Args:
        model: the sharded module, its weights in place: the tensors that hold them are kept.
    """
    seen: set[nn.Parameter] = set()
    # inner units first: what is inside them is theirs
    for unit in reversed(list(model.modules())):
        if not isinstance(unit, FSDPModule):
            continue
        own = {p for p in unit.parameters() if isinstance(p, DTensor)} - seen
        seen |= own
        arriving = _Gradients()
        copies = _Copies(arriving)
        for parameter in own:
            shard = parameter._local_tensor  # where FSDP looks for extensions
            if type(shard) is torch.Tensor and shard.is_floating_point():
                copies.stand_in_for_gathering(shard)
        _take_gradients(unit, own, arriving)


class _Copies:
    """What one unit computes with. FSDP asks for all its parameters, then takes them one by one.

    Args:
        gradients: of the unit, told when a pass begins to use it.
    """

    def __init__(self, gradients: "_Gradients") -> None:
        self._gradients = gradients
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
            self._gradients.begin()
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

    Small ones that have to be cast are so all at once, when the last of them is there. Where some
    do not arrive, as of experts that no token went to, FSDP finds the others where autograd left
    them.
    """

    def __init__(self) -> None:
        self._together = 0
        self._waiting: list[tuple[nn.Parameter, torch.Tensor]] = []

    def hand_over(self, parameter: nn.Parameter, computed: torch.Tensor) -> None:
        """Put gradients of what is computed with on its parameter from now on."""
        together = parameter.dtype != computed.dtype and parameter.numel() < _CAST_ALONE
        self._together += together
        hook = self._wait if together else self._take
        take = partial(hook, parameter)
        computed.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Forget what the last pass left to FSDP."""
        self._waiting = []

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter, computed: torch.Tensor) -> None:
        assert computed.grad is not None
        gradient, computed.grad = computed.grad.to(parameter.dtype), None
        _add_gradient(parameter, gradient)

    @torch.no_grad()
    def _wait(self, parameter: nn.Parameter, computed: torch.Tensor) -> None:
        self._waiting.append((parameter, computed))
        if len(self._waiting) < self._together:
            return
        # FSDP may have taken some already
        there = [(one, made, made.grad) for one, made in self._waiting if made.grad is not None]
        self._waiting = []
        cast = [torch.empty_like(grad, dtype=one.dtype) for one, _, grad in there]
        torch._foreach_copy_(cast, [grad for _, _, grad in there])
        for (one, made, _), gradient in zip(there, cast, strict=True):
            made.grad = None
            _add_gradient(one, gradient)


def _add_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    assert isinstance(parameter, DTensor)
    if parameter.grad is not None:
        local(parameter.grad).add_(gradient)
    else:
        # as FSDP makes them: `from_local` asks autograd, hundreds of times a step
        parameter.grad = DTensor(  # type: ignore[no-untyped-call]
            gradient, parameter._spec, requires_grad=False
        )
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)


def _take_gradients(unit: FSDPModule, own: Collection[nn.Parameter], arriving: _Gradients) -> None:
    """Hand over gradients of what a unit computes with, but for parts of split parameters."""
    assert isinstance(unit, nn.Module)
    sharded = list(unit.parameters())
    unit.unshard()
    for parameter, computed in zip(sharded, unit.parameters(), strict=True):
        if parameter in own and computed.requires_grad and not isinstance(computed, DTensor):
            arriving.hand_over(parameter, computed)
    unit.reshard()
