"""`profile: {steps: [10, 12]}`: where the device's time goes, as a trace and in words."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("communication", ("nccl", "gloo")),
    ("attention", ("sdpa", "attention", "flash", "fmha")),
    ("matmul", ("gemm", "nvjet", "cutlass", "wgmma", "addmm", "aten::mm", "matmul", "cublas")),
    ("optimizer", ("adam", "multi_tensor", "foreach")),
    ("copies", ("memcpy", "copy_", "memset", "split_with_sizes", "cat_")),
)


def kind_of(kernel: str) -> str:
    """What a kernel does, by its name."""
    lowered = kernel.lower()
    for kind, words in _KINDS:
        if any(word in lowered for word in words):
            return kind
    return "other kernels"


def read_steps(profile: dict[str, Any] | None) -> range:
    """The steps to profile; a recipe's rule has seen to it that there are a first and a last."""
    if profile is None:
        return range(0)
    first, last = profile["steps"]
    return range(first, last + 1)


def summarize(times: Iterable[tuple[str, float, int]], steps: int) -> str:
    """A table of kinds and of the longest kernels.

    Args:
        times: name, microseconds over all profiled steps and number of calls of each kernel.
        steps: profiled steps.
    """
    rows = sorted(times, key=lambda row: -row[1])
    total = sum(time for _, time, _ in rows) or 1.0
    kinds: dict[str, float] = defaultdict(float)
    for name, time, _ in rows:
        kinds[kind_of(name)] += time
    lines = [f"{total / steps / 1000:.1f} ms of kernels a step"]
    for kind, time in sorted(kinds.items(), key=lambda item: -item[1]):
        lines.append(f"{kind:14} {time / steps / 1000:9.2f} ms  {time / total:6.1%}")
    lines += ["", "    ms/step  calls/step  kind            kernel"]
    for name, time, calls in rows[:40]:
        each = f"{time / steps / 1000:11.2f} {calls / steps:11.1f}"
        lines.append(f"{each}  {kind_of(name):14}  {name[:90]}")
    return "\n".join(lines) + "\n"


class StepProfiler:
    """Profiles some steps of the main rank.

    Args:
        steps: numbers of the steps, counted from 1.
        folder: where `trace.json.gz` and `profile.txt` go.
        device: the rank's device.
    """

    def __init__(self, steps: range, folder: Path, device: torch.device) -> None:
        self._steps = steps
        self._folder = folder
        self._device = device
        self._profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Start when this is the first step to profile."""
        if self._steps and step == self._steps.start:
            kinds = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                kinds.append(ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=kinds)
            self._profiler.start()

    def is_last(self, step: int) -> bool:
        """Whether this was the last step to profile."""
        return self._profiler is not None and step == self._steps.stop - 1

    def finish(self, step: int) -> str:
        """Stop and write what was seen; returns what to tell the user."""
        profiler = self._profiler
        assert profiler is not None, "is_last says when to finish"
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profiler.stop()
        self._profiler = None
        trace, table = self._folder / "trace.json.gz", self._folder / "profile.txt"
        profiler.export_chrome_trace(str(trace))
        on_cuda = self._device.type == "cuda"
        times = [
            (
                event.key,
                float(event.self_device_time_total if on_cuda else event.self_cpu_time_total),
                int(event.count),
            )
            for event in profiler.key_averages()
            if not on_cuda or event.device_type.name == "CUDA"
        ]
        table.write_text(summarize(times, len(self._steps)), encoding="utf-8")
        return f"Steps {self._steps.start} to {step} are profiled in {table} and {trace}."
