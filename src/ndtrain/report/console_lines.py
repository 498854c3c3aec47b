"""The words of the console, as pure functions of events: the same on a terminal and in a pipe."""

import shlex
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ndtrain.report.events import (
    OVER,
    CheckpointSaved,
    EvalDone,
    ProfileDone,
    RunEnded,
    RunStarted,
    SamplesDone,
    StepDone,
)
from ndtrain.report.history import History
from ndtrain.report.model_card import exported_step
from ndtrain.report.prediction import judge_prediction, read_plan
from ndtrain.report.step_time import step_time
from ndtrain.report.wording import change, count, duration, short_count, sparkline

_ANSWER_CHARACTERS = 240


class Pace:
    """How long the rest takes, from the median of the last steps; the first ones do not count.

    Args:
        warm_up: steps left out at the start, which pay for compilation and caches.
        window: steps the median is taken over.
    """

    def __init__(self, warm_up: int = 2, window: int = 50) -> None:
        self._warm_up = warm_up
        self._seconds: deque[float] = deque(maxlen=window)

    def add(self, step_seconds: float, done: int) -> None:
        """Take note of one step.

        Args:
            step_seconds: what it took.
            done: steps of this start with it; between two lines there may be many.
        """
        if done > self._warm_up:
            self._seconds.append(step_seconds)

    def eta(self, steps_left: int) -> float | None:
        """Seconds the remaining steps take; None before it can be told."""
        if steps_left <= 0 or not self._seconds:
            return None
        return statistics.median(self._seconds) * steps_left


def start_lines(event: RunStarted) -> Iterator[str]:
    """Where, on what and with how many parameters; three lines."""
    begun = f"resumes after step {event.start_step} of" if event.start_step else "steps:"
    yield f"run    {event.run_dir} ({begun} {event.total_steps}, {event.steps_per_epoch} an epoch)"
    ranks = 1
    for size in event.mesh.values():
        ranks *= size
    axes = " × ".join(f"{axis} {size}" for axis, size in event.mesh.items())
    yield f"mesh   {axes} = {ranks} rank{'s' if ranks > 1 else ''} on {event.device}"
    if event.num_trainable == event.num_parameters:
        share = "all trained"
    else:
        percent = 100 * event.num_trainable / max(1, event.num_parameters)
        share = f"{short_count(event.num_trainable)} trained ({percent:.2g} %)"
    if event.adapted:
        share += f": adapters on {', '.join(event.adapted)}"
    yield f"model  {short_count(event.num_parameters)} parameters, {share}"


def step_parts(event: StepDone, eta: float | None) -> list[str]:
    """The numbers of a step, most important first."""
    parts = [
        f"loss {event.loss:.4f}",
        f"lr {event.lr:.2e}",
        f"grad {event.grad_norm:.3g}",
        f"{short_count(event.tokens_per_second)} tok/s",
        f"{event.memory_gib:.2f} GiB",
    ]
    if event.mfu is not None:
        parts.append(f"MFU {100 * event.mfu:.1f} %")
    if eta is not None:
        parts.append(f"ETA {duration(eta)}")
    return parts


def step_line(event: StepDone, total_steps: int, eta: float | None) -> str:
    """The step on one line of a log."""
    place = f"step {event.step:>{len(str(total_steps))}}/{total_steps}"
    percent = f"{100 * event.step / max(1, total_steps):5.1f} %"
    return "  ".join([place, percent, *step_parts(event, eta)])


def eval_line(event: EvalDone, history: History) -> str:
    """The evaluation, and how far the loss came since the first one."""
    line = f"eval   step {event.step}: held-out loss {event.loss:.4f}"
    if history.evals and history.evals[0]["step"] < event.step:
        line += f" ({change(history.evals[0]['loss'], event.loss)} since the first)"
    if len(event.by_dataset) > 1:
        line += "; " + ", ".join(f"{name} {loss:.4f}" for name, loss in event.by_dataset.items())
    return line


def sample_lines(event: SamplesDone) -> Iterator[str]:
    """Each prompt with its answer, on a line of its own, cut where it is long."""
    for prompt, answer in event.answers.items():
        yield f"sample {_shown(prompt, 80)} → {_shown(answer, _ANSWER_CHARACTERS)}"


def checkpoint_line(event: CheckpointSaved) -> str:
    """Where it is and what it cost."""
    waited = f"training waited {event.blocked_seconds:.1f}s"
    return f"saved  {event.path} in {event.seconds:.1f}s ({waited})"


def profile_line(event: ProfileDone, run_dir: Path) -> str:
    """Where the profiled steps went, and where more of it is to be read."""
    paths = ", ".join(str(run_dir / name) for name in event.files)
    where = f" ({paths})" if paths else ""
    return f"time   {step_time(asdict(event))}{where}"


def summary_lines(
    event: RunEnded, history: History, run_dir: Path, elapsed: float, next_command: str
) -> Iterator[str]:
    """What came of the run, where it is and what to type next."""
    yield f"{_ending(event.reason)} at step {event.step} after {duration(elapsed)}"
    losses = [value for _, value in history.curve("loss")]
    if losses:
        yield f"loss   {losses[0]:.4f} → {losses[-1]:.4f}  {sparkline(losses)}"
    if history.evals:
        first, last = history.evals[0]["loss"], history.evals[-1]["loss"]
        fell = f" → {last:.4f}  ({change(first, last)})" if len(history.evals) > 1 else ""
        yield f"eval   {first:.4f}{fell}"
    if history.steps:
        yield f"tokens {count(history.steps[-1]['seen_tokens'])} trained on"
    if history.profiles:
        yield f"time   {step_time(history.profiles[-1])}"
    verdict = judge_prediction(read_plan(run_dir / "plan.json"), history)
    if verdict is not None:
        yield f"plan   {verdict}"
    # what is told of steps may lie there from a run before
    told = history.profiles[-1]["files"] if history.profiles else ()
    names = ("export", "report.html", "loss.svg", "metrics.jsonl", *told, "checkpoints")
    found = [name for name in names if _holds_something(run_dir / name)]
    exported = exported_step(run_dir / "export")
    is_other = exported not in (None, event.step)
    if is_other:
        found = [f"export (of step {exported})" if name == "export" else name for name in found]
    yield f"files  {run_dir}/: {', '.join(found)}" if found else f"files  {run_dir}/"
    # of a run that is over export/ is as the recipe asks, also where an earlier step was better
    if is_other and event.reason not in OVER:
        path = shlex.quote(str(run_dir))
        yield f"note   For the model of step {event.step}: ndtrain export {path} DEST"
    if next_command:
        yield f"next   {next_command}"


def _holds_something(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))


def _ending(reason: str) -> str:
    if reason == "finished":
        return "Finished"
    if reason == "max_steps":
        return "Stopped (--max-steps)"
    return f"Stopped ({reason.replace('_', ' ')})"


def _shown(text: str, most: int) -> str:
    flat = " ".join(text.split())
    return f"'{flat if len(flat) <= most else flat[: most - 1] + '…'}'"
