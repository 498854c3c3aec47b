"""Every reporter takes every event of a recorded run, and of a run that goes wrong."""

import io
import math
from dataclasses import replace

import pytest

from ndtrain.report.console import LiveConsole, PlainConsole
from ndtrain.report.events import (
    EvalDone,
    Event,
    Notice,
    Reporter,
    RunEnded,
    RunStarted,
    StepDone,
)
from ndtrain.report.history import History
from ndtrain.report.html import PageAtEnd
from ndtrain.report.metrics import MetricsWriter, read_metrics
from ndtrain.report.reporters import AllOf, build_reporters, next_command
from ndtrain.report.svg import LossPicture
from ndtrain.report.trackers import TrackerReporter


class Silent:
    def start(self) -> None: ...

    def store_init_configuration(self, values) -> None: ...

    def log(self, values, step=None) -> None: ...

    def finish(self) -> None: ...


def all_reporters(finished) -> dict[str, Reporter]:
    from rich.console import Console

    def ignore(event: Event) -> None: ...

    history, stream = History(), io.StringIO()
    return {
        "metrics": MetricsWriter(finished.metrics, history),
        "picture": LossPicture(finished.loss_svg, history, "Loss"),
        "page": PageAtEnd(finished.path, ignore),
        "plain": PlainConsole(stream, history, finished.path),
        "live": LiveConsole(Console(file=stream, force_terminal=True), history, finished.path),
        "tracker": TrackerReporter("x", Silent(), ignore),
    }


NAMES = ["metrics", "picture", "page", "plain", "live", "tracker"]


@pytest.mark.parametrize("name", NAMES)
def test_every_reporter_takes_a_whole_run_and_closes_twice(name, finished, events):
    reporter = all_reporters(finished)[name]
    for event in events:
        reporter.write(event)
    reporter.close()
    reporter.close()


@pytest.mark.parametrize("name", NAMES)
def test_every_reporter_takes_a_run_that_diverges(name, finished, started, step):
    reporter = all_reporters(finished)[name]
    for event in (
        started,
        EvalDone(0, math.inf, 1),
        step(1, math.nan, grad_norm=math.inf, tokens_per_second=math.nan),
        RunEnded("diverged", 1, 7),
    ):
        reporter.write(event)
    reporter.close()


@pytest.mark.parametrize("name", NAMES)
def test_every_reporter_takes_an_end_without_a_start(name, finished):
    reporter = all_reporters(finished)[name]
    reporter.write(RunEnded("finished before", 6, 0))
    reporter.close()


def test_all_together_write_the_run_directory(run_dir, recipe, events):
    stream = io.StringIO()
    run_dir.write_resolved(recipe, {})
    reporter = build_reporters(run_dir, recipe, stream=stream)
    for event in events:
        reporter.write(event)
    reporter.close()
    assert len(read_metrics(run_dir.metrics)) == len(events)
    assert "<polyline" in run_dir.loss_svg.read_text()
    assert "</html>" in run_dir.report_html.read_text()
    assert stream.getvalue().splitlines()[-7:] == [
        "Finished at step 6 after 0s",
        "loss   2.7500 → 1.5000  █▇▅▄▂▁",
        "eval   3.0000 → 1.8000  (−40.0 %)",
        "tokens 600 trained on",
        "time   matmul 68 %, attention 24 %, other kernels 6 %, waiting for the host 1 %; 64 % of "
        "the card's matmul rate",
        f"files  {run_dir.path}/: report.html, loss.svg, metrics.jsonl",
        f'next   ndtrain generate {run_dir.path} --prompt "..."',
    ]


def test_logging_steps_thins_steps_but_nothing_else(started, step):
    class Kept:
        def __init__(self) -> None:
            self.events: list[Event] = []

        def write(self, event: Event) -> None:
            self.events.append(event)

        def close(self) -> None: ...

    kept = Kept()
    reporter = AllOf([kept], logging_steps=4)
    reporter.write(RunStarted(**{**vars(started), "total_steps": 10}))
    for number in range(1, 11):
        reporter.write(step(number))
        reporter.write(EvalDone(number, 1.0, 1))
    assert [event.step for event in kept.events if isinstance(event, StepDone)] == [1, 4, 8, 10]
    assert sum(isinstance(event, EvalDone) for event in kept.events) == 10


def test_the_next_command_fits_the_end(run_dir):
    spaced = replace(run_dir, path=run_dir.path / "a run")
    after = next_command(spaced)
    assert after(RunEnded("finished", 6, 0)) == f"ndtrain generate '{spaced.path}' --prompt \"...\""
    again = "the same command again resumes after step 6"
    assert after(RunEnded("max_time", 6, 143)) == again
    assert after(RunEnded("diverged", 6, 7)) == ""


def test_all_are_closed_also_when_one_fails():
    closed: list[str] = []

    class Closing:
        def __init__(self, name: str) -> None:
            self._name = name

        def write(self, event: Event) -> None: ...

        def close(self) -> None:
            closed.append(self._name)
            if self._name == "b":
                raise OSError("full")

    with pytest.raises(OSError, match="full"):
        AllOf([Closing(name) for name in "abc"]).close()
    assert sorted(closed) == ["a", "b", "c"]


class Kept:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None: ...


def test_the_last_step_is_told_wherever_the_run_ends(started, step):
    kept = Kept()
    reporter = AllOf([kept], logging_steps=5)
    stop = RunEnded("sigint", 4, 130)
    for event in (started, *(step(number, 3.0) for number in range(1, 5)), stop):
        reporter.write(event)
    reporter.close()
    assert kept.events == [started, step(1, 3.0), step(4, 3.0), stop]


def test_the_last_step_is_told_once_and_before_what_reads_it(started, step):
    kept = Kept()
    reporter = AllOf([kept], logging_steps=5)
    for number, event in enumerate((started, step(1, 3.0), step(2, 3.0))):
        reporter.write(event)
        assert len(kept.events) == min(number + 1, 2)
    reporter.tell_last_step()
    checked, stop = Notice("The export was reloaded."), RunEnded("max_steps", 2, 0)
    reporter.write(checked)
    reporter.write(stop)
    reporter.close()
    assert kept.events == [started, step(1, 3.0), step(2, 3.0), checked, stop]


def test_the_last_step_before_a_failure_is_told(started, step):
    kept = Kept()
    reporter = AllOf([kept], logging_steps=2)
    for event in (started, *(step(number, 3.0) for number in range(1, 4))):
        reporter.write(event)
    reporter.close()
    reporter.close()
    assert kept.events == [started, *(step(number, 3.0) for number in (1, 2, 3))]
