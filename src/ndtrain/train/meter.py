"""Speed and memory of a run: tokens, floating-point work and bytes."""

import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from ndtrain.data.batch import StepBatch
from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.step_time import flops_per_token

GIB = 2**30


@dataclass(frozen=True)
class Rates:
    """Speed of one step.

    Attributes:
        tokens_per_second: tokens that are not padding, over all ranks.
        tflops_per_device: model work a second and device, None when the sizes are not known.
        mfu: its share of the device's dense bf16 rate, None off known GPUs.
    """

    tokens_per_second: float
    per_device: float
    tflops_per_device: float | None
    mfu: float | None


@dataclass(frozen=True)
class Meter:
    """Measures steps.

    Attributes:
        output: run directory, for what a diverged step leaves behind.
        peak_tflops: the device's dense bf16 rate by the hardware book, None when it is not there.
        frozen: the base model is frozen, so its weights get no gradients.
    """

    device: torch.device
    world_size: int
    facts: ModelFacts | None
    sequence_len: int
    frozen: bool
    output: Path
    peak_tflops: float | None = None

    def rates(self, batch: StepBatch, seconds: float) -> Rates:
        """Speed of a step that took `seconds`."""
        speed = batch.num_tokens / seconds
        tflops = self.tflops_per_device(batch.num_tokens, seconds)
        mfu = None
        if tflops is not None and self.peak_tflops is not None:
            mfu = tflops / self.peak_tflops
        return Rates(speed, speed / self.world_size, tflops, mfu)

    def tflops_per_device(self, tokens: int, seconds: float) -> float | None:
        """Model work a second and device, over all ranks' tokens; None as in `Rates`."""
        if self.facts is None or self.device.type != "cuda":
            return None
        work = flops_per_token(self.facts, self.sequence_len, frozen=self.frozen)
        return tokens / seconds / self.world_size * work / 1e12

    def memory_gib(self) -> float:
        """Most memory held so far: reserved on the device, resident on a host."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device) / GIB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
