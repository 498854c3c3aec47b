"""All reporters of a run behind one `write`."""

import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TextIO

from rich.console import Console

from ndtrain.environment import no_color
from ndtrain.errors import ExitCode
from ndtrain.recipe.schema import Recipe
from ndtrain.report.console import ConsoleReporter, LiveConsole, PlainConsole
from ndtrain.report.events import Event, Reporter, RunEnded, RunStarted, StepDone
from ndtrain.report.history import History
from ndtrain.report.html import PageAtEnd
from ndtrain.report.metrics import MetricsWriter
from ndtrain.report.prediction import PredictionAtEnd
from ndtrain.report.run_directory import RunDirectory
from ndtrain.report.svg import LossPicture
from ndtrain.report.trackers import start_trackers


class AllOf:
    """Hands each event to several reporters, in order.

    Args:
        reporters: in the order in which they hear of an event.
        logging_steps: steps between those that are reported; the first always is, and so is the
            last, wherever the run ends.
    """

    def __init__(self, reporters: Sequence[Reporter], logging_steps: int = 1) -> None:
        self._reporters = tuple(reporters)
        self._logging_steps = logging_steps
        self._total_steps = 0
        self._seen_step = False
        self._held_back: StepDone | None = None

    def write(self, event: Event) -> None:
        """Pass the event on."""
        if isinstance(event, RunStarted):
            self._total_steps = event.total_steps
        if isinstance(event, StepDone):
            due = event.step % self._logging_steps == 0 or event.step >= self._total_steps
            self._held_back = event if self._seen_step and not due else None
            if self._held_back is not None:
                return
            self._seen_step = True
        if isinstance(event, RunEnded):
            self.tell_last_step()
        self._pass_on(event)

    def tell_last_step(self) -> None:
        """Pass on the last step if it was not due; at the end of training, before what reads it."""
        last, self._held_back = self._held_back, None
        if last is not None:
            self._pass_on(last)

    def _pass_on(self, event: Event) -> None:
        for reporter in self._reporters:
            reporter.write(event)

    def close(self) -> None:
        """Close all of them, the last first, also when one of them fails."""
        with ExitStack() as stack:
            for reporter in self._reporters:
                stack.callback(reporter.close)
            stack.callback(self.tell_last_step)


def build_reporters(
    run_dir: RunDirectory,
    recipe: Recipe,
    *,
    stream: TextIO | None = None,
) -> AllOf:
    """Metrics, trackers, pictures and console of the main rank.

    Args:
        run_dir: where the files go.
        recipe: what is run.
        stream: where lines go, standard output by default.
    """
    history = History()
    metrics = MetricsWriter(run_dir.metrics, history)
    console = _console(stream or sys.stdout, history, run_dir, next_command(run_dir))
    tell = AllOf([metrics, console]).write
    trackers = start_trackers(run_dir, recipe, tell)
    # The console comes after the files, so that its summary can name them.
    return AllOf(
        [
            metrics,
            *trackers,
            LossPicture(run_dir.loss_svg, history, f"Loss of {run_dir.path.name}"),
            # The page shows what this one writes.
            PredictionAtEnd(run_dir.plan, history, tell),
            PageAtEnd(run_dir.path, tell),
            console,
        ],
        recipe.logging_steps,
    )


def next_command(run_dir: RunDirectory) -> Callable[[RunEnded], str]:
    """What to do after the run: try the model, or continue where it stopped."""

    def after(event: RunEnded) -> str:
        if event.exit_code == ExitCode.OK:
            return f'ndtrain generate {shlex.quote(str(run_dir.path))} --prompt "..."'
        if event.exit_code in (ExitCode.SIGINT, ExitCode.SIGTERM):
            return f"the same command again resumes after step {event.step}"
        return ""

    return after


def _console(
    stream: TextIO,
    history: History,
    run_dir: RunDirectory,
    command: Callable[[RunEnded], str],
) -> ConsoleReporter:
    console = Console(file=stream, no_color=no_color(), highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveConsole(console, history, run_dir.path, command)
    return PlainConsole(stream, history, run_dir.path, command)
