"""`report.html`: everything about a run on one page that needs no network and no other file.

To show something new, write a function `RecordedRun -> str` in `html_sections.py` or
`html_numbers.py` that gives an empty string when there is nothing to show, and list it in
`SECTIONS`.
"""

from collections.abc import Callable
from html import escape
from importlib.resources import files
from pathlib import Path

from ndtrain import __version__
from ndtrain.errors import CheckpointError
from ndtrain.report import html_numbers, html_sections
from ndtrain.report.atomic import replace_text
from ndtrain.report.chart import CHART_STYLE
from ndtrain.report.events import Event, Notice, RunEnded
from ndtrain.report.recorded import RecordedRun, read_run

SECTIONS = (
    html_numbers.header,
    html_numbers.tiles,
    html_numbers.charts,
    html_sections.mesh,
    html_sections.memory,
    html_sections.profile,
    html_sections.data,
    html_sections.samples,
    html_sections.recipe,
    html_sections.machine,
    html_sections.events,
)
"""The page from top to bottom."""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def render_page(run: RecordedRun) -> str:
    """The page as text."""
    page = files("ndtrain.report") / "page"
    style = page.joinpath("page.css").read_text(encoding="utf-8")
    script = page.joinpath("page.js").read_text(encoding="utf-8")
    body = "\n".join(filter(None, (section(run) for section in SECTIONS)))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(run.name)} · ndtrain</title>
<style>
{style}{CHART_STYLE}</style>
</head>
<body>
<main>
{body}
<footer>Written by ndtrain {__version__} from the files beside this page.</footer>
</main>
<script>
{script}</script>
</body>
</html>
"""


def write_page(run_dir: Path) -> Path:
    """Draw the page of a run directory; returns where it is.

    Raises:
        CheckpointError: the folder is not a run, or cannot be written.
    """
    run = read_run(run_dir)
    replace_text(run.directory.report_html, render_page(run))
    return run.directory.report_html


class PageAtEnd:
    """Draws the page once the run has ended.

    Args:
        run_dir: the folder whose files it is drawn from.
        tell: takes the notice that the page could not be drawn.
    """

    def __init__(self, run_dir: Path, tell: Callable[[Event], None]) -> None:
        self._run_dir = run_dir
        self._tell = tell

    def write(self, event: Event) -> None:
        """Draw when this was the last event."""
        if isinstance(event, RunEnded):
            try:
                write_page(self._run_dir)
            except CheckpointError as error:
                # The model is trained and saved: a page that is missing must not undo that.
                self._tell(Notice(f"report.html was not written: {error}"))

    def close(self) -> None:
        """Nothing is held."""
