"""Reading a step's numbers without making the device wait.

On CUDA the host works ahead: a step's loss and norm are read while the next step is computed, and
a step that is not finite is left out by the optimizer kernel itself, which reads a flag on the
device. On CPU there is nothing to gain, so numbers are read at once.
"""

import time
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from ndtrain.train.step import StepResult


@dataclass(frozen=True)
class Reading:
    """Numbers of one step on the host.

    Attributes:
        seconds: from the end of the step before, or from the start.
        local_finite: whether this rank's own loss was finite.
    """

    loss: float
    grad_norm: float
    local_finite: bool
    seconds: float


class Stopwatch:
    """Takes the time at which the device has done what it was given so far."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._event: torch.cuda.Event | None = None
        self._time = 0.0
        if self._on_cuda:
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._time = time.perf_counter()

    def wait(self) -> None:
        """Block until the device is there."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: "Stopwatch") -> float:
        """Seconds since another stopwatch was taken."""
        if self._event is not None and earlier._event is not None:
            self.wait()
            return float(earlier._event.elapsed_time(self._event)) / 1000
        return self._time - earlier._time


class DeferredNumbers:
    """The numbers of a step on their way to the host.

    Args:
        result: on the device.
        begun: when the step before ended, or this one began.
    """

    def __init__(self, result: StepResult, begun: Stopwatch) -> None:
        device = result.loss.device
        numbers = torch.stack(
            [result.loss, result.grad_norm, torch.isfinite(result.local_loss).float()]
        )
        if device.type == "cuda":
            self._host = torch.empty(3, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
        else:
            self._host = numbers
        self._begun = begun
        self.ended = Stopwatch(device)

    def read(self) -> Reading:
        """Wait for the numbers."""
        seconds = self.ended.since(self._begun)
        loss, norm, local_finite = self._host.tolist()
        return Reading(loss, norm, bool(local_finite), seconds)


def skips_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether the optimizer's kernel can leave a step out by a flag on the device."""
    return device.type == "cuda" and all(group.get("fused") for group in optimizer.param_groups)


def flag_nonfinite(optimizer: Optimizer, result: StepResult) -> None:
    """Let the fused kernel leave the coming step out when loss or norm is not finite.

    The attribute is the one through which torch's gradient scaler tells fused optimizers.
    """
    finite = torch.isfinite(result.loss) & torch.isfinite(result.grad_norm)
    optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
