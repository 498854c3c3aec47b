"""`loss.svg`: the training and evaluation loss of a run."""

from pathlib import Path

from ndtrain.report.atomic import replace_text
from ndtrain.report.chart import CHART_STYLE, Series, draw_chart
from ndtrain.report.events import EvalDone, Event, RunEnded
from ndtrain.report.history import History


def loss_chart(
    history: History,
    title: str = "Loss",
    *,
    style: str = CHART_STYLE,
    width: int = 720,
    height: int = 360,
) -> str:
    """Both curves; empty `style` when the page around it carries the style."""
    return draw_chart(
        title,
        [
            Series("training", history.curve("loss"), "first", noisy=True),
            Series("held-out", history.eval_curve(), "second", dotted=True),
        ],
        style=style,
        width=width,
        height=height,
    )


class LossPicture:
    """Redraws the file after each evaluation and at the end.

    Args:
        path: the file.
        history: gathered by another reporter before this one hears of the event.
        title: stands above the curves.
    """

    def __init__(self, path: Path, history: History, title: str) -> None:
        self._path = path
        self._history = history
        self._title = title

    def write(self, event: Event) -> None:
        """Redraw when there is something new to see."""
        if isinstance(event, EvalDone | RunEnded):
            replace_text(self._path, loss_chart(self._history, self._title) + "\n")

    def close(self) -> None:
        """Nothing is held."""
