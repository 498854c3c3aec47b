import io
import re
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console

from ndtrain.report.console import LiveConsole, PlainConsole
from ndtrain.report.events import Event, Notice
from ndtrain.report.history import History


class Steady:
    """A clock that is read once and then moves on by a fixed time."""

    def __init__(self, seconds: float) -> None:
        self._times = (number * seconds for number in count())

    def __call__(self) -> float:
        return next(self._times)


def plain(events: list[Event], seconds: float = 10.0, history: History | None = None) -> list[str]:
    stream = io.StringIO()
    reporter = PlainConsole(stream, history or History(), Path("runs/small"), clock=Steady(seconds))
    for event in events:
        reporter.write(event)
    reporter.close()
    return stream.getvalue().splitlines()


def steps_in(lines: list[str]) -> list[str]:
    return [line.split()[1] for line in lines if line.startswith("step")]


def test_the_whole_run_in_a_pipe(events):
    assert plain(events) == [
        "note   flash_attention is chosen by ndtrain itself.",
        "run    runs/small (steps: 6, 3 an epoch)",
        "mesh   dp_replicate 1 × dp_shard 2 × cp 1 × tp 1 = 2 ranks on cpu",
        "model  135M parameters, all trained",
        "eval   step 0: held-out loss 3.0000",
        "step 1/6   16.7 %  loss 2.7500  lr 1.00e-04  grad 0.5  50 tok/s  1.50 GiB",
        "step 2/6   33.3 %  loss 2.5000  lr 1.00e-04  grad 0.5  50 tok/s  1.50 GiB",
        "step 3/6   50.0 %  loss 2.2500  lr 1.00e-04  grad 0.5  50 tok/s  1.50 GiB  ETA 6s",
        "eval   step 3: held-out loss 2.4000",
        "sample 'What is tp?' → 'It splits <big> matrices & more.'",
        "saved  checkpoints/step-000003 in 1.5s (training waited 0.2s)",
        "step 4/6   66.7 %  loss 2.0000  lr 1.00e-04  grad 0.5  50 tok/s  1.50 GiB  ETA 4s",
        "step 5/6   83.3 %  loss 1.7500  lr 1.00e-04  grad 0.5  50 tok/s  1.50 GiB  ETA 2s",
        "time   matmul 68 %, attention 24 %, other kernels 6 %, waiting for the host 1 %; 64 % of "
        "the card's matmul rate (runs/small/profile.txt, runs/small/trace.json.gz)",
        "step 6/6  100.0 %  loss 1.5000  lr 1.00e-04  grad 0.5  50 tok/s  1.50 GiB",
        "eval   step 6: held-out loss 1.8000",
        "Finished at step 6 after 1m10s",
        "files  runs/small/",
    ]


def test_fast_steps_show_the_first_the_last_and_one_every_few_seconds(events):
    assert steps_in(plain(events, seconds=0.001)) == ["1/6", "6/6"]
    assert steps_in(plain(events, seconds=2.5)) == ["1/6", "3/6", "5/6", "6/6"]


def test_many_notices_do_not_hide_the_first_loss(events):
    lines = plain([*(Notice(f"notice {place}") for place in range(30)), *events])
    first_loss = next(place for place, line in enumerate(lines) if line.startswith("step"))
    assert first_loss <= 12
    assert lines[first_loss - 1] == "note   26 more notices are in metrics.jsonl"


def test_no_escape_codes_in_a_pipe(events):
    assert "\x1b" not in "\n".join(plain(events))


def test_a_reader_that_leaves_does_not_stop_the_run(events):
    class Closed(io.StringIO):
        attempts = 0

        def write(self, text: str) -> int:
            self.attempts += 1
            raise BrokenPipeError

    stream = Closed()
    reporter = PlainConsole(stream, History(), Path("runs/small"))
    for event in events:
        reporter.write(event)
    assert stream.attempts == 1


def test_a_terminal_without_unicode_gets_question_marks(events):
    raw = io.BytesIO()
    reporter = PlainConsole(io.TextIOWrapper(raw, encoding="ascii"), History(), Path("runs/small"))
    reporter.write(events[1])
    assert b"mesh   dp_replicate 1 ? dp_shard 2" in raw.getvalue()


def live(events: list[Event], width: int = 140, **options: bool) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream, force_terminal=True, width=width, height=40, color_system="standard", **options
    )
    reporter = LiveConsole(console, History(), Path("runs/small"), lambda _: "ndtrain generate x")
    for event in events:
        reporter.write(event)
    reporter.close()
    return stream.getvalue()


def test_a_terminal_shows_one_line_that_moves(events):
    shown = live(events)
    assert "step 1/6" in shown
    assert "100 %" in shown
    assert "━" in shown
    assert "\x1b[1mloss 1.5000" in shown
    # The line is gone before the summary, and the cursor is never away for long.
    assert "step 6/6" not in shown[shown.rindex("Finished at step 6") :]
    assert shown.index("\x1b[?25h") < shown.index("step 1/6")
    assert "ndtrain generate x" in shown


def test_no_colour_when_the_user_wants_none(events):
    shown = live(events, no_color=True)
    assert not any(f"\x1b[{code}m" in shown for code in (32, 33, 36, 90, "1;32"))


@pytest.mark.parametrize("width", [40, 80, 140])
def test_the_progress_line_fits_the_terminal(events, width):
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", live(events[1:4], width))
    progress = [line for line in re.split(r"[\r\n]", text) if "step 1/6" in line]
    assert progress
    assert all(len(line.rstrip()) <= width for line in progress)
