"""What stands on the terminal: one progress line, or plain lines where output is piped."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ndtrain.report import console_lines as lines
from ndtrain.report.events import (
    CheckpointSaved,
    EvalDone,
    Event,
    Notice,
    ProfileDone,
    RunEnded,
    RunStarted,
    SamplesDone,
    StepDone,
)
from ndtrain.report.history import History

NOTICES_BEFORE_FIRST_STEP = 5
"""More of them would push the first loss out of sight; the rest is counted."""


class ConsoleReporter:
    """Turns events into lines; a subclass says how a line and the progress are shown.

    Args:
        history: gathered by the metrics writer, which hears of each event first.
        run_dir: named in the summary.
        next_command: the command that follows, given the exit code.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        history: History,
        run_dir: Path,
        next_command: Callable[[RunEnded], str] = lambda _: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history = history
        self._run_dir = run_dir
        self._next_command = next_command
        self._clock = clock
        self._begun = clock()
        self._pace = lines.Pace()
        self._total_steps = 0
        self._start_step = 0
        self._seen_step = False
        self._num_notices = 0

    def write(self, event: Event) -> None:
        """Show the event."""
        match event:
            case RunStarted():
                self._begun = self._clock()
                self._total_steps = event.total_steps
                self._start_step = event.start_step
                for line in lines.start_lines(event):
                    self._say(line)
            case StepDone():
                self._write_step(event)
            case EvalDone():
                self._say(lines.eval_line(event, self._history))
            case SamplesDone():
                for line in lines.sample_lines(event):
                    self._say(line)
            case CheckpointSaved():
                self._say(lines.checkpoint_line(event))
            case ProfileDone():
                self._say(lines.profile_line(event, self._run_dir))
            case Notice():
                self._write_notice(event)
            case RunEnded():
                self._write_end(event)

    def close(self) -> None:
        """Leave the terminal as it was."""

    def _write_step(self, event: StepDone) -> None:
        hidden = self._num_notices - NOTICES_BEFORE_FIRST_STEP
        if not self._seen_step and hidden > 0:
            self._say(f"note   {hidden} more notices are in metrics.jsonl")
        self._pace.add(event.step_seconds, event.step - self._start_step)
        self._show_step(event, self._pace.eta(self._total_steps - event.step))
        self._seen_step = True

    def _write_notice(self, event: Notice) -> None:
        self._num_notices += 1
        if self._seen_step or self._num_notices <= NOTICES_BEFORE_FIRST_STEP:
            self._say(f"note   {event.text}")

    def _write_end(self, event: RunEnded) -> None:
        elapsed = self._clock() - self._begun
        command = self._next_command(event)
        for line in lines.summary_lines(event, self._history, self._run_dir, elapsed, command):
            self._say(line)

    def _say(self, line: str) -> None:
        raise NotImplementedError

    def _show_step(self, event: StepDone, eta: float | None) -> None:
        raise NotImplementedError


class PlainConsole(ConsoleReporter):
    """Lines for pipes and log files: the first step, then one every few seconds, then the last."""

    def __init__(
        self,
        stream: TextIO,
        history: History,
        run_dir: Path,
        next_command: Callable[[RunEnded], str] = lambda _: "",
        clock: Callable[[], float] = time.monotonic,
        seconds_between: float = 5.0,
    ) -> None:
        super().__init__(history, run_dir, next_command, clock)
        self._stream = stream
        self._seconds_between = seconds_between
        self._last_line = 0.0
        self._reader_left = False

    def _show_step(self, event: StepDone, eta: float | None) -> None:
        now = self._clock()
        due = now - self._last_line >= self._seconds_between
        if due or not self._seen_step or event.step >= self._total_steps:
            self._last_line = now
            self._say(lines.step_line(event, self._total_steps, eta))

    def _say(self, line: str) -> None:
        if self._reader_left:
            return
        try:
            self._stream.write(writable(line, self._stream) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            # `ndtrain train ... | head` must not end hours of training.
            self._reader_left = True


class LiveConsole(ConsoleReporter):
    """A line that stays at the bottom of a terminal, with all other lines above it."""

    def __init__(
        self,
        console: Console,
        history: History,
        run_dir: Path,
        next_command: Callable[[RunEnded], str] = lambda _: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(history, run_dir, next_command, clock)
        self._console = console
        # Drawn at events only: a refresh thread would compete with the training for the processor.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._last_drawn = 0.0

    def close(self) -> None:
        """Remove the progress line and give the cursor back."""
        self._live.stop()

    def _write_end(self, event: RunEnded) -> None:
        self._live.stop()
        super()._write_end(event)

    def _show_step(self, event: StepDone, eta: float | None) -> None:
        if not self._seen_step:
            self._live.start()
            # A run that is killed could not give a hidden cursor back.
            self._console.show_cursor(True)
        now = self._clock()
        if not self._seen_step or now - self._last_drawn >= 0.1 or event.step >= self._total_steps:
            self._last_drawn = now
            self._live.update(self._progress(event, eta), refresh=True)

    def _progress(self, event: StepDone, eta: float | None) -> RenderableType:
        percent = f"{100 * event.step // max(1, self._total_steps)} %"
        words = [f"step {event.step}/{self._total_steps}", percent, *lines.step_parts(event, eta)]
        text = Text("  ".join(words), no_wrap=True, overflow="ellipsis")
        text.highlight_regex(r"loss \S+", "bold")
        text.highlight_regex(r"ETA \S+", "cyan")
        bar = ProgressBar(total=max(1, self._total_steps), completed=event.step)
        if self._console.width < 60:
            return text
        if self._console.width < 120:
            return Group(text, bar)
        row = Table.grid(padding=(0, 2))
        row.add_column(width=24)
        row.add_column()
        row.add_row(bar, text)
        return row

    def _say(self, line: str) -> None:
        line = writable(line, self._console.file)
        label, body = line[:7], line[7:]
        text = Text(line)
        if label.strip() in {
            "run",
            "mesh",
            "model",
            "eval",
            "sample",
            "saved",
            "loss",
            "tokens",
            "time",
            "plan",
        }:
            text = Text.assemble((label, "dim"), body)
        elif label.strip() == "note":
            text = Text.assemble((label, "yellow"), body)
        elif label.strip() == "next":
            text = Text.assemble((label, "dim"), (body, "bold green"))
        self._console.print(text, soft_wrap=True)


def writable(line: str, stream: IO[str]) -> str:
    """The line with a question mark for each character that the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return line.encode(encoding, errors="replace").decode(encoding)
