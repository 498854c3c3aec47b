"""`profile: {steps: [10, 12]}`: where the device's time goes, as a trace and in words."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, record_function

from ndtrain.data.batch import StepBatch
from ndtrain.environment import quiet_profiler
from ndtrain.errors import CheckpointError
from ndtrain.report.atomic import replace_file
from ndtrain.report.events import Event, Notice, ProfileDone
from ndtrain.report.run_directory import RunDirectory
from ndtrain.train import profile_words as words
from ndtrain.train.matmul_rate import matmul_tflops
from ndtrain.train.meter import Meter
from ndtrain.train.step_account import Span, StepAccount, account, covered, kinds_of

_FETCH = "ndtrain: next batch"
_OPTIMIZER = "Optimizer.step"
"""How torch's annotation of an optimizer's step begins."""


def read_steps(profile: dict[str, Any] | None) -> range:
    """The steps to profile; a recipe's rule has seen to it that there are a first and a last."""
    if profile is None:
        return range(0)
    first, last = profile["steps"]
    return range(first, last + 1)


@dataclass(frozen=True)
class Seen:
    """What the profiler recorded; times in microseconds of one clock.

    Attributes:
        work: kernels where there are any, else operators.
        own: time of each of them, without that of operators it called.
        optimizer: spans of the optimizer's steps, where the work is.
        fetches: spans in which the loop waited for its next batch.
        on_device: whether the work is a device's.
    """

    work: Sequence[Span]
    own: Sequence[float]
    optimizer: Sequence[Span]
    fetches: Sequence[Span]
    on_device: bool

    @cached_property
    def window(self) -> tuple[float, float]:
        """From where the first batch was asked for to the end of the last work."""
        return self.fetches[0].start, max(span.end for span in (*self.fetches, *self.work))

    @property
    def seconds(self) -> float:
        """Length of the window."""
        begin, end = self.window
        return (end - begin) / 1e6

    def timed(self) -> list[words.Timed]:
        """The work with its kinds."""
        kinds = kinds_of(self.work, self.optimizer)
        return [
            words.Timed(span.name, kind, own)
            for span, kind, own in zip(self.work, kinds, self.own, strict=True)
        ]

    def account(self) -> StepAccount:
        """The device's window, moment by moment."""
        return account(
            self.work, optimizer=self.optimizer, fetches=self.fetches, window=self.window
        )


def sort_events(events: Sequence[FunctionEvent]) -> Seen:
    """Work, optimizer and fetches of a finished profile; annotations are no work themselves."""
    on_device = any(not _of_host(event) and not event.is_user_annotation for event in events)
    work, own, optimizer, fetches = [], [], [], []
    for event in events:
        span = Span(event.name, event.time_range.start, event.time_range.end)
        if event.is_user_annotation and _of_host(event) and event.name == _FETCH:
            fetches.append(span)
        if _of_host(event) is on_device:
            continue
        if not event.is_user_annotation:
            work.append(span)
            own.append(span.end - span.start if on_device else event.self_cpu_time_total)
        elif event.name.startswith(_OPTIMIZER):
            optimizer.append(span)
    return Seen(work, own, optimizer, sorted(fetches, key=lambda span: span.start), on_device)


def _of_host(event: FunctionEvent) -> bool:
    return event.device_type.name == "CPU"


def tell(
    seen: Seen,
    steps: range,
    *,
    work: float | None,
    matmul: float | None,
    alone: bool,
) -> tuple[ProfileDone, str]:
    """What was seen as an event, and as the text of `profile.txt`.

    Args:
        steps: that were profiled.
        work: TFLOP/s of the model's own work on one device, None when it is not known.
        matmul: those of one large product on it, None when there was no room to time it.
        alone: there are no other ranks to wait for.
    """
    each = seen.seconds / len(steps)
    calls = seen.timed()
    data_wait = covered(seen.fetches, seen.window) / 1e6 / seen.seconds
    title = words.steps_words(steps.start, steps.stop - 1, each)
    hidden = 0.0
    if seen.on_device:
        found = seen.account()
        shares = found.shares
        hidden = found.hidden_communication / found.window
        lines = [f"{title}, on the main rank's device:"]
        lines += words.device_lines(found, len(steps), alone=alone)
        lines.append(words.rate_line(work, matmul))
    else:
        times = words.sums_by_kind(calls)
        shares = {kind: time / sum(times.values()) for kind, time in times.items()}
        lines = [f"{title}, on the main rank:"]
        lines += words.operator_lines(times, len(steps), data_wait)
    lines += ["", *words.longest_lines(calls, len(steps))]
    done = ProfileDone(
        step=steps.stop - 1,
        first_step=steps.start,
        step_seconds=each,
        device="cuda" if seen.on_device else "cpu",
        shares=shares,
        data_wait=data_wait,
        hidden_communication=hidden,
        tflops_per_device=work,
        matmul_tflops=matmul,
        files=[],
    )
    return done, "\n".join(lines) + "\n"


class StepProfiler:
    """Profiles some steps of the main rank.

    Args:
        steps: numbers of the steps, counted from 1.
        run_dir: where the trace and the words go.
        device: the rank's device.
    """

    def __init__(self, steps: range, run_dir: RunDirectory, device: torch.device) -> None:
        self._steps = steps
        self._run_dir = run_dir
        self._device = device
        self._profiler: torch.profiler.profile | None = None
        self._prepares_at = 0
        self._records = False
        self._reached = False
        self._tokens = 0

    def watch(
        self, batches: Iterator[StepBatch], first_step: int, last_step: int
    ) -> Iterator[StepBatch]:
        """The same batches; the steps to profile are recorded from the wait for their batch on.

        Nothing is profiled by a run that begins after the first of these steps, or ends before it.

        Args:
            batches: one a step.
            first_step: of this start of the run.
            last_step: where it ends at the latest; the profile then ends there too.
        """
        if not self._steps or not first_step <= self._steps.start <= last_step:
            # an earlier start has been there
            self._reached = first_step >= self._steps.stop
            return batches
        self._steps = range(self._steps.start, min(self._steps.stop, last_step + 1))
        return self._watch(batches, first_step)

    def _watch(self, batches: Iterator[StepBatch], step: int) -> Iterator[StepBatch]:
        # getting ready takes seconds in which batches pile up: a step earlier, where there is one
        self._prepares_at = max(step, self._steps.start - 1)
        while True:
            if step == self._prepares_at:
                self._profiler = self._prepare()
            if step == self._steps.start and self._profiler is not None:
                self._synchronize()
                self._profiler.start_trace()
                self._records = True
            with record_function(_FETCH) if self._records else contextlib.nullcontext():
                batch = next(batches, None)
            if batch is None:
                return
            self._tokens += batch.num_tokens if self._records else 0
            yield batch
            step += 1

    def is_starting(self, step: int) -> bool:
        """Whether the time before this step went into the profiler and is no step's."""
        prepares = self._profiler is not None and step == self._prepares_at
        return prepares or (self._records and step == self._steps.start)

    def is_last(self, step: int) -> bool:
        """Whether this was the last step to profile."""
        return self._records and step == self._steps.stop - 1

    def finish(self, meter: Meter) -> list[Event]:
        """Stop, write what was seen, and tell of it; once `is_last` says so.

        A file that cannot be written is told of too: it must not cost the run.
        """
        profiler, self._profiler = self._profiler, None
        self._records, self._reached = False, True
        assert profiler is not None, "is_last says when to finish"
        self._synchronize()
        profiler.stop_trace()
        seen = sort_events(profiler.events())  # type: ignore[no-untyped-call]
        done, text = tell(
            seen,
            self._steps,
            work=meter.tflops_per_device(self._tokens, seen.seconds),
            matmul=matmul_tflops(self._device) if seen.on_device else None,
            alone=meter.world_size == 1,
        )
        files, notices = [], list[Event]()
        writers: dict[Path, Callable[[Path], object]] = {
            self._run_dir.profile: lambda path: path.write_text(text, encoding="utf-8"),
            self._run_dir.trace: lambda path: profiler.export_chrome_trace(str(path)),
        }
        for path, write in writers.items():
            try:
                replace_file(path, write)
            except CheckpointError as error:
                notices.append(Notice(f"{error.where} {error.message}"))
            else:
                files.append(path.name)
        return [replace(done, files=files), *notices]

    def close(self) -> str | None:
        """Drop a profile that the run has ended in: one left running breaks the process's exit.

        Returns:
            That steps which were asked for are not told of, where it is so.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            if not self._records:
                profiler.start_trace()
            profiler.stop_trace()
        self._records = False
        if self._reached or not self._steps:
            return None
        first, last = self._steps.start, self._steps.stop - 1
        if first == last:
            return f"Step {first} did not happen in this start: there is no profile of it."
        which = f"Steps {first} to {last}"
        return f"{which} did not all happen in this start: there is no profile of them."

    def _prepare(self) -> torch.profiler.profile:
        kinds = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        quiet_profiler()
        profiler = torch.profiler.profile(activities=kinds)
        profiler.prepare_trace()
        return profiler

    def _synchronize(self) -> None:
        """Wait for the device, so that what it does for other steps stays outside."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
