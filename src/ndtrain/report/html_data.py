"""What was trained on: counts, sources and a histogram of row lengths, from `data.json`."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from ndtrain.report.html_tables import flat_rows, table
from ndtrain.report.wording import short_count

_KNOWN = {
    "v",
    "sources",
    "train_rows",
    "eval_rows",
    "tokens",
    "trained_tokens",
    "longest",
    "lengths",
    "packed_rows",
    "fill",
    "cached",
    "trained_share",
}


def data_cards(data: Mapping[str, Any]) -> str:
    """A card of counts beside one a source; a key this page does not know is shown as it is."""
    rows = [*_counts(data), *flat_rows({k: v for k, v in data.items() if k not in _KNOWN})]
    if not rows:
        return ""
    picture = draw_lengths(data.get("lengths") or ())
    sources = "".join(
        f'<div class="card">{table(list(_source(source)), numbers=True)}</div>'
        for source in data.get("sources") or ()
    )
    return (
        f'<div class="columns"><div class="card">{table(rows, numbers=True)}{picture}</div>'
        f'<div class="stack">{sources}</div></div>'
    )


def _counts(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "train_rows" in data:
        yield "rows an epoch", f"{data['train_rows']:,}"
    if data.get("packed_rows") is not None:
        filled = f", {100 * data['fill']:.1f} % filled" if data.get("fill") is not None else ""
        yield "packed rows", f"{data['packed_rows']:,}{filled}"
    for name, rows in (data.get("eval_rows") or {}).items():
        yield f"held-out rows of {name}", f"{rows:,}"
    if "tokens" in data:
        yield "tokens an epoch", f"{data['tokens']:,}"
    if "trained_tokens" in data:
        whole = data.get("tokens") or data["trained_tokens"] or 1
        share = 100 * data["trained_tokens"] / whole
        yield "of them trained", f"{data['trained_tokens']:,} ({share:.1f} %)"
    if "longest" in data:
        yield "longest row", f"{data['longest']:,} tokens"


def _source(source: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "source", str(source["path"])
    yield "rows used", f"{source['rows_used']:,} of {source['rows_in']:,}"
    yield "tokens", f"{source['tokens']:,}, {source['trained_tokens']:,} trained"
    if source.get("duplicates"):
        yield "duplicates left out", f"{source['duplicates']:,}"
    for kind, words in (("dropped", "dropped"), ("changed", "changed"), ("warnings", "warning")):
        for reason, rows in (source.get(kind) or {}).items():
            yield f"{words}: {reason.replace('_', ' ')}", f"{rows:,}"


def draw_lengths(bins: Sequence[Sequence[int]]) -> str:
    """Rows by length as bars; each bin is its upper bound in tokens and its rows."""
    most = max((rows for _, rows in bins), default=0)
    if not most:
        return ""
    width, height, floor = 480, 150, 120
    step = min(48, width / len(bins))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart lengths" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="Rows by length">'
    ]
    for place, (top, rows) in enumerate(bins):
        tall = round(rows / most * (floor - 16), 2)
        below = bins[place - 1][0] + 1 if place else 1
        parts.append(
            f'<g class="first"><title>{below:,} to {top:,} tokens: {rows:,} rows</title>'
            f'<rect class="key" x="{place * step + 1:.2f}" y="{floor - tall:.2f}" '
            f'width="{max(1.0, step - 2):.2f}" height="{tall}" rx="2"/></g>'
        )
    parts.append(f'<line class="base" x1="0" x2="{width}" y1="{floor}" y2="{floor}"/>')
    parts.append(f'<text x="{width}" y="12" text-anchor="end">rows by length in tokens</text>')
    every = -(-len(bins) // 6)
    for place in range(0, len(bins), every):
        x = max(12.0, min(width - 20.0, (place + 0.5) * step))
        label = escape(short_count(bins[place][0]))
        parts.append(f'<text x="{x:.2f}" y="{floor + 18}" text-anchor="middle">{label}</text>')
    parts.append("</svg>")
    return "\n".join(parts)
