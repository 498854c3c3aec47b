"""Brings weights from files to a device through locked host memory.

The pages of a mapped file are not locked, and so a driver copies them through a small buffer of its
own, in one thread that also takes the page faults. Here all host threads fill one buffer while the
device reads the other.
"""

import torch

_BUFFER_BYTES = 64 * 2**20
_LEAST_BYTES = 2**20
"""Below this a plain copy costs nothing that counts."""


class StagedCopies:
    """Copies host tensors into a device's, in the device's current stream.

    A copy may still run when `copy` returns; what is computed on the device later comes after it.

    Args:
        device: where the destinations are; on a CPU every copy is a plain one.
        buffer_bytes: size of each of the two buffers.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self._staged = device.type == "cuda"
        self._bytes = buffer_bytes
        self._buffers: list[torch.Tensor] = []
        self._read: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    @torch.no_grad()
    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy values, converted to the destination's dtype on its device.

        Args:
            destination: on the device.
            source: in host memory, of the same shape.
        """
        staged = self._staged and source.device.type == "cpu" and source.nbytes >= _LEAST_BYTES
        if staged and source.is_contiguous() and destination.is_contiguous():
            self.copy_flat(destination.view(-1), source.view(-1))
        else:
            destination.copy_(source)

    def copy_flat(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous vectors part by part, through the two buffers in turn."""
        step = self._bytes // source.element_size()
        for start in range(0, source.numel(), step):
            part = source[start : start + step]
            buffer = self._free_buffer()[: part.nbytes].view(part.dtype)
            buffer.copy_(part)
            goal = destination[start : start + step]
            if goal.dtype != part.dtype:
                # sent as it is and converted there: `copy_` would convert on the host
                buffer = buffer.to(goal.device, non_blocking=True)
            goal.copy_(buffer, non_blocking=True)
            self._in_use()

    def _free_buffer(self) -> torch.Tensor:
        """The buffer whose turn it is, once the device has read it."""
        if not self._buffers:
            self._buffers = [
                torch.empty(self._bytes, dtype=torch.uint8, pin_memory=self._staged)
                for _ in range(2)
            ]
        read = self._read[self._turn]
        if read is not None:
            read.synchronize()
        return self._buffers[self._turn]

    def _in_use(self) -> None:
        """Remember when the device will have read the buffer; the other one's turn comes."""
        if self._staged:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._read[self._turn] = event
        self._turn = 1 - self._turn
