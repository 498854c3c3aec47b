"""The upper half of the page: what came of the run, in tiles and charts."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from ndtrain.report.chart import Series, draw_chart
from ndtrain.report.recorded import RecordedRun
from ndtrain.report.svg import loss_chart
from ndtrain.report.wording import change, duration, number, short_count

_CURVES = (
    ("lr", "Learning rate", number, False),
    ("grad_norm", "Gradient norm", number, True),
    ("tokens_per_second", "Tokens a second", short_count, True),
    ("memory_gib", "Memory in GiB", number, False),
    ("mfu", "Model FLOPs utilisation", number, True),
)
"""Key of a step, title, how its values are written, whether they jump from step to step."""


def header(run: RecordedRun) -> str:
    """Name, how it ended, and what was trained in which way."""
    word, kind = _state(run)
    adapter = run.settings.get("adapter")
    method = {"lora": "LoRA", "qlora": "QLoRA"}.get(str(adapter), "Full fine-tuning")
    parts = [f"{method} of {run.model_name}"]
    if run.parallel:
        parts.append(str(run.parallel))
    if run.history.starts:
        parts.append(str(run.history.starts[-1]["device"]))
    return (
        f'<header><h1>{escape(run.name)}</h1><span class="state {kind}">{escape(word)}</span>'
        f'<p class="lead">{escape(" · ".join(parts))}</p></header>'
    )


def _state(run: RecordedRun) -> tuple[str, str]:
    """A word and the class that colours it."""
    if not run.history.ends:
        return "running", "stopped"
    last = run.history.ends[-1]
    reason = str(last["reason"]).replace("_", " ")
    if last["exit_code"] == 0:
        return reason, "done"
    return reason, "stopped" if last["exit_code"] in (130, 143) else "failed"


def tiles(run: RecordedRun) -> str:
    """The numbers one asks for first."""
    return f'<section class="tiles">{"".join(_tiles(run))}</section>' if run.history.steps else ""


def _tiles(run: RecordedRun) -> Iterator[str]:
    steps, evals = run.history.steps, run.history.evals
    if evals:
        yield _fall("Held-out loss", evals)
    yield _fall("Training loss", steps)
    total = f"of {run.history.starts[-1]['total_steps']:,}" if run.history.starts else ""
    epochs = f"{steps[-1]['epoch']:.4g} epochs"
    yield _tile("Steps", f"{steps[-1]['step']:,}", ", ".join(filter(None, (total, epochs))))
    yield _tile("Trained tokens", short_count(steps[-1]["seen_tokens"]), "over all ranks")
    speeds = [record["tokens_per_second"] for record in steps]
    yield _tile("Tokens a second", short_count(statistics.median(speeds)), "median")
    # Only the logged steps are known, so each stands for those since the one before it.
    seconds, before = 0.0, run.history.starts[0]["start_step"] if run.history.starts else 0
    for record in steps:
        seconds += record["step_seconds"] * (record["step"] - before)
        before = record["step"]
    yield _tile("Time in steps", duration(seconds), "saves and evals apart")
    peak = _peak(run)
    digits = f"{peak:.2f}" if peak < 10 else f"{peak:.3g}"
    yield _tile("Peak memory", f"{digits} GiB", "of one rank")


def _peak(run: RecordedRun) -> float:
    return max(float(record["memory_gib"]) for record in run.history.steps)


def _fall(label: str, records: Sequence[Mapping[str, Any]]) -> str:
    """The last loss, and the way to it from the first one, where there are two."""
    first, last = records[0]["loss"], records[-1]["loss"]
    moved = change(first, last)
    kind = "better" if last < first else "worse"
    note = f"{moved} from {first:.4g}" if moved else f"from {first:.4g}"
    if len(records) == 1:
        note = "measured once"
    value = f"{last:.4g}" if math.isfinite(last) else str(last)
    return _tile(label, value, note, kind if last != first else "")


def _tile(label: str, value: str, note: str = "", kind: str = "") -> str:
    return (
        f'<div class="card tile"><div class="label">{escape(label)}</div>'
        f'<div class="value">{escape(value)}</div>'
        f'<div class="note {kind}">{escape(note)}</div></div>'
    )


def charts(run: RecordedRun) -> str:
    """Loss across the page, the other curves below it in pairs."""
    pictures = [
        draw_chart(
            title,
            [Series(title.lower(), points, noisy=noisy)],
            width=540,
            height=280,
            words=words,
        )
        for key, title, words, noisy in _CURVES
        if len(points := run.history.curve(key)) > 1
    ]
    # The page carries the style of all charts.
    loss = loss_chart(run.history, style="", width=1080, height=400)
    small = "".join(f'<figure class="card">{picture}</figure>' for picture in pictures)
    return f'<figure class="card" id="loss">{loss}</figure><div class="charts">{small}</div>'
