"""Inputs of recomputed blocks wait in host memory for the backward pass.

A block that is recomputed, by autograd or within its compiled graph, keeps nothing but its input.
Packed away by hooks on what autograd saves around the block, that input is copied out while the
next block runs, and brought back while the block after it is recomputed. On CUDA both copies run
beside the computation on a stream of their own; on CPU the same hooks only copy.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

_COPIES_IN_FLIGHT = 2
"""Inputs that may still be on their way out while later blocks run."""

_AHEAD = 1
"""Inputs brought back before they are asked for."""


class _Parked:
    """One tensor in host memory.

    Attributes:
        earlier: what was parked before it, which the backward pass asks for next.
    """

    def __init__(self, host: torch.Tensor, device: torch.device, earlier: "_Parked | None") -> None:
        self.host = host
        self.device = device
        self.fetched: torch.Tensor | None = None
        self.arrived: torch.cuda.Event | None = None
        # not held: a graph that is dropped takes what it parked with it
        self.earlier = weakref.ref(earlier) if earlier is not None else lambda: None


class HostParking:
    """Parks what autograd saves in host memory, and brings it back in time.

    Args:
        device: where the tensors are computed with.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._leaving: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._newest: Callable[[], _Parked | None] = lambda: None

    def pack(self, address: int, tensor: torch.Tensor) -> "_Parked | torch.Tensor":
        """Copy the block's input out; weights, and what all blocks share, stay.

        Args:
            address: where the input lies. A compiled block keeps another tensor of the same
                memory, and to hold the input itself here would keep it from being freed.
            tensor: one of the tensors that autograd keeps.
        """
        if tensor.data_ptr() != address or tensor.numel() == 0:
            return tensor
        parked = _Parked(self._copy_out(tensor.detach()), tensor.device, self._newest())
        self._newest = weakref.ref(parked)
        return parked

    def unpack(self, parked: "_Parked | torch.Tensor") -> torch.Tensor:
        """The tensor on its device, and those before it on their way."""
        if isinstance(parked, torch.Tensor):
            return parked
        self._fetch(parked)
        tensor, parked.fetched = parked.fetched, None
        assert tensor is not None
        if parked.arrived is not None:
            torch.cuda.current_stream(parked.device).wait_event(parked.arrived)
        before = parked.earlier()
        for _ in range(_AHEAD):
            if before is not None:
                self._fetch(before)
                before = before.earlier()
        return tensor

    def _copy_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._stream is None:
            return tensor.clone()
        current = torch.cuda.current_stream(tensor.device)
        while len(self._leaving) >= _COPIES_IN_FLIGHT:
            # the memory of a tensor that has left may be used again, but only from here on
            current.wait_event(self._leaving.popleft()[1])
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        self._leaving.append((tensor, self._stream.record_event()))
        return host

    def _fetch(self, parked: _Parked) -> None:
        if parked.fetched is not None:
            return
        if self._stream is None:
            parked.fetched = parked.host
            return
        # allocated for the computing stream, so that its memory is used again in that order
        tensor = torch.empty(parked.host.shape, dtype=parked.host.dtype, device=parked.device)
        self._stream.wait_stream(torch.cuda.current_stream(parked.device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(parked.host, non_blocking=True)
        parked.fetched, parked.arrived = tensor, self._stream.record_event()


def apply_offload(blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Keep the inputs of recomputed blocks in host memory.

    Args:
        blocks: blocks that are recomputed as a whole, in the order in which they run; their
            `forward` is replaced.
        device: where they run.
    """
    parking = HostParking(device)
    for block in blocks:
        block.forward = partial(_parking_forward, parking, block.forward)


def _parking_forward(
    parking: HostParking,
    forward: Callable[..., Any],
    hidden: torch.Tensor,
    *arguments: Any,
    **named: Any,
) -> Any:
    pack = partial(parking.pack, hidden.data_ptr())
    with torch.autograd.graph.saved_tensors_hooks(pack, parking.unpack):
        return forward(hidden, *arguments, **named)
