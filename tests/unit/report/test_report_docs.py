"""The reference page names what the files really hold."""

from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from ndtrain.report.console_lines import Pace, start_lines, step_line
from ndtrain.report.events import Event, RunStarted
from ndtrain.report.prediction import Verdict
from ndtrain.report.run_directory import RunDirectory
from ndtrain.report.trackers import TRACKERS

DOCS = Path(__file__).parents[3] / "docs"
REFERENCE = (DOCS / "reference" / "run-directory.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", get_args(Event), ids=lambda kind: kind.event)
def test_each_event_with_all_its_keys(kind):
    (row,) = [line for line in REFERENCE.splitlines() if line.startswith(f"| `{kind.event}` |")]
    keys = row.split("`")[3::2]
    assert keys == [field.name for field in fields(kind)]


def test_each_file_of_the_run_directory():
    run = RunDirectory(Path())
    properties = [name for name, value in vars(RunDirectory).items() if isinstance(value, property)]
    for name in properties:
        assert f"`{getattr(run, name).as_posix()}" in REFERENCE, name


def test_each_tracker():
    page = (DOCS / "how-to" / "use-a-tracker.md").read_text(encoding="utf-8")
    for name in TRACKERS:
        assert f'| {name} | `pip install "ndtrain[{name}]"` |' in page


def test_the_lines_of_a_run_have_the_form_that_they_are_written_in(step):
    page = (DOCS / "how-to" / "follow-a-run.md").read_text(encoding="utf-8")
    mesh = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}
    started = RunStarted("runs/small", 0, 4580, 229, mesh, "cpu", 39_100, 39_100)
    first = step(1, 5.7974, lr=1e-3, grad_norm=1.16, tokens_per_second=270.0, memory_gib=0.41)
    later = step(152, 2.7738, lr=9.97e-4, grad_norm=0.884, tokens_per_second=3210, memory_gib=0.41)
    lines = [*start_lines(started), step_line(first, 4580, None), step_line(later, 4580, 565.0)]
    assert "```text\n" + "\n".join(lines) + "\n```" in page
    assert f"```text\nplan   {Verdict(5.84, 5.08, 0.105, 0.1, 50)}\n```" in page


def test_the_time_left_is_told_as_the_page_says():
    page = (DOCS / "how-to" / "follow-a-run.md").read_text(encoding="utf-8")
    defaults = Pace.__init__.__defaults__
    assert defaults is not None
    assert f"The time is the median of the last {defaults[1]} steps" in page
