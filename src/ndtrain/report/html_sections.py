"""The lower half of the page: mesh, memory, data, samples, recipe, machine and events."""

import re
from html import escape

from ndtrain.report.html_data import data_cards
from ndtrain.report.html_tables import flat_rows, section, table
from ndtrain.report.mesh_picture import draw_mesh, hidden_ranks
from ndtrain.report.planned_memory import planned_gib
from ndtrain.report.prediction import compare_memory, judge_prediction
from ndtrain.report.recorded import RecordedRun
from ndtrain.report.step_time import step_time_rows
from ndtrain.report.wording import duration

_AXIS_WORDS = {
    "dp_replicate": "copies of the model, each with rows of its own",
    "dp_shard": "ranks that share the weights of a copy, each with rows of its own",
    "cp": "ranks that share a sequence",
    "tp": "ranks that share a large matrix",
}


def mesh(run: RecordedRun) -> str:
    """The grid of ranks, and what each axis shares."""
    parallel = run.parallel
    if parallel is None:
        return ""
    sizes = zip(_AXIS_WORDS.items(), parallel.sizes, strict=True)
    rows = [(axis, f"{size}: {words}") for (axis, words), size in sizes]
    if run.plan.get("batch"):
        batch = run.plan["batch"]
        rows.append(
            (
                "batch",
                f"{batch['micro_batch']} × {batch['accumulation']} accumulated × "
                f"{batch['data_ranks']} data ranks = {run.plan['global_batch']} rows a step",
            )
        )
    hidden = hidden_ranks(parallel)
    more = f'<p class="small">{hidden:,} more ranks are not drawn.</p>' if hidden else ""
    caption = "A frame is one copy of the model: dp_shard downwards, cp and tp across."
    picture = draw_mesh(parallel, run.plan.get("ranks", ()))
    return section(
        "Mesh",
        f'<div class="columns"><div class="card"><div class="scroll">{picture}</div>{more}'
        f'<p class="small">{caption}</p></div><div class="card">{table(rows)}</div></div>',
    )


def memory(run: RecordedRun) -> str:
    """Planned against measured memory."""
    parts = _memory(run)
    return section("Memory of one rank", parts) if parts else ""


def profile(run: RecordedRun) -> str:
    """Where the profiled steps went."""
    if not run.history.profiles:
        return ""
    rows = list(step_time_rows(run.history.profiles[-1]))
    return section("Where a step goes", f'<div class="card">{table(rows, numbers=True)}</div>')


def data(run: RecordedRun) -> str:
    """What the rows are like."""
    cards = data_cards(run.data)
    return section("Data", cards) if cards else ""


def _memory(run: RecordedRun) -> str:
    planned = planned_gib(run.plan.get("memory"))
    measured = max((float(record["memory_gib"]) for record in run.history.steps), default=0.0)
    if not planned:
        return ""
    total = sum(planned.values())
    widest = max(total, measured) or 1.0
    # Seven hues are told apart; smaller parts share the last one.
    ordered = sorted(planned.items(), key=lambda part: -part[1])
    shown = [
        *ordered[:6],
        *([("other", sum(gib for _, gib in ordered[6:]))] if ordered[6:] else []),
    ]
    bars = "".join(
        f'<i class="part-{place}" style="width:{100 * gib / widest:.2f}%" '
        f'title="{escape(name)}: {gib:.3g} GiB"></i>'
        for place, (name, gib) in enumerate(shown)
    )
    keys = "".join(
        f'<span><b class="part-{place}"></b>{escape(name)} {gib:.3g} GiB</span>'
        for place, (name, gib) in enumerate(shown)
    )
    # The summary's words and numbers, where there is a prediction to judge.
    verdict = judge_prediction(run.plan, run.history)
    predicted, peak = total, measured
    if verdict is not None:
        predicted, peak = verdict.predicted_gib, verdict.measured_gib
    words = compare_memory(predicted, peak) if peak else f"{predicted:.2f} GiB predicted"
    found = ""
    if peak:
        found = (
            '<div class="of">measured</div><div class="bar">'
            f'<i class="measured" style="width:{100 * peak / widest:.2f}%"></i></div>'
        )
    return (
        f'<div class="card">{words}<div class="of">predicted, by what it is for</div>'
        f'<div class="bar">{bars}</div><div class="keys">{keys}</div>{found}</div>'
    )


def samples(run: RecordedRun) -> str:
    """Each prompt with its first, its middle and its last answer."""
    told = run.history.samples
    if not told:
        return ""
    chosen = [told[place] for place in sorted({0, len(told) // 2, len(told) - 1})]
    blocks = []
    for prompt in told[-1]["answers"]:
        answers = "".join(
            f'<div class="answer"><span class="label">step {record["step"]}</span>'
            f"{escape(record['answers'][prompt])}</div>"
            for record in chosen
            if prompt in record["answers"]
        )
        blocks.append(
            f'<div class="sample"><div class="prompt">{escape(prompt)}</div>'
            f'<div class="answers">{answers}</div></div>'
        )
    return section("Sample answers", f'<div class="card">{"".join(blocks)}</div>')


def recipe(run: RecordedRun) -> str:
    """The resolved recipe; what the user chose stands out, defaults can be shown."""
    if not run.resolved_text:
        return ""
    lines = "".join(_recipe_line(line) for line in run.resolved_text.splitlines())
    return section(
        "Recipe",
        '<div class="card recipe"><label class="switch"><input type="checkbox"> show defaults'
        f"</label><pre>{lines}</pre></div>",
    )


def _recipe_line(line: str) -> str:
    found = re.fullmatch(r"(.*?)(  # (?:default|--set.*|\S+:\d+:\d+))", line)
    if found is None:
        return f'<span class="origin">{escape(line)}\n</span>'
    kind = "default" if found[2].endswith("# default") else "set"
    return (
        f'<span class="{kind}">{escape(found[1])}<span class="origin">{escape(found[2])}</span>\n'
        "</span>"
    )


def machine(run: RecordedRun) -> str:
    """Versions and devices."""
    rows = [row for row in flat_rows(run.env) if row[1]]
    if not rows:
        return ""
    return f"<details><summary>Machine and versions</summary>{table(rows)}</details>"


def events(run: RecordedRun) -> str:
    """Starts, checkpoints, notices and ends."""
    history = run.history
    rows = [
        *((f"step {one['start_step']}", f"started on {one['device']}") for one in history.starts),
        *(
            (
                f"step {one['step']}",
                f"saved {one['path']} in {duration(one['seconds'])}, "
                f"training waited {one['blocked_seconds']:.1f}s",
            )
            for one in history.checkpoints
        ),
        *(("note", one["text"]) for one in history.notices),
        *(
            (f"step {one['step']}", f"{one['reason']}, exit code {one['exit_code']}")
            for one in history.ends
        ),
    ]
    if not rows:
        return ""
    return f"<details><summary>Starts, checkpoints and notices</summary>{table(rows)}</details>"
