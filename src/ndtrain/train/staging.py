"""Copies of a run's tensors in host memory, made beside the training and written from there.

torch has a class for this, `DefaultStager`; that of torch 2.11 can be used for one save only.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class HostCopies:
    """Copies tensors in a thread of its own, into memory that is kept from save to save.

    On CUDA the memory is locked, and the copies run on a stream of their own, which knows nothing
    of what else is computed: the caller waits for that before it asks for a copy, and changes no
    tensor before the copy is done.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, "staging")
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> "Future[dict[str, torch.Tensor]]":
        """Start a copy; what it gives is overwritten by the next one.

        Args:
            tensors: plain ones and DTensors, of which this rank's part is copied.
        """
        return self._thread.submit(self._copy, dict(tensors))

    def close(self) -> None:
        """Wait for the copy that runs, and give the memory back."""
        self._thread.shutdown()
        for name in list(self._buffers):
            self._drop(name)

    @torch.no_grad()
    def _copy(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in self._buffers.keys() - tensors.keys():
            self._drop(name)
        copies = {}
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                buffer = self._buffer(name, local)
                buffer.copy_(local, non_blocking=self._stream is not None)
                copies[name] = _like(tensor, buffer)
        if self._stream is not None:
            self._stream.synchronize()
        return copies

    def _buffer(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Memory for this tensor: that of the last save where it still fits."""
        known = self._buffers.get(name)
        if known is not None and (known.shape, known.dtype) == (local.shape, local.dtype):
            return known
        if known is not None:
            self._drop(name)
        buffer = torch.empty(local.shape, dtype=local.dtype)
        if self._stream is not None and buffer.nbytes:
            # locked where it lies: torch's own locked memory is rounded up to a power of two
            _check(_driver().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        self._buffers[name] = buffer
        return buffer

    def _drop(self, name: str) -> None:
        buffer = self._buffers.pop(name)
        if self._stream is not None and buffer.nbytes:
            _check(_driver().cudaHostUnregister(buffer.data_ptr()))


def _like(tensor: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """The copy, placed in the whole tensor as the original is."""
    if not isinstance(tensor, DTensor):
        return buffer
    # from_local would bring the copy back to the mesh's device
    copy: torch.Tensor = DTensor(buffer, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return copy


def _driver() -> Any:
    """CUDA's own functions."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(outcome: Any) -> None:
    """Raise where the driver refused."""
    if int(outcome):
        raise RuntimeError(f"host memory cannot be locked or unlocked (CUDA error {int(outcome)})")
