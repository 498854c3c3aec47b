"""The mesh as a grid of ranks: one framed block a copy of the model, one cell a rank."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from ndtrain.plan.plan import ParallelPlan

_CELL, _GAP, _GROUP_GAP = 40, 6, 16
_MOST_COPIES, _MOST_ROWS, _MOST_COLUMNS = 8, 16, 32


def draw_mesh(parallel: ParallelPlan, ranks: Sequence[Mapping[str, Any]] = ()) -> str:
    """An `<svg>` element: blocks are dp_replicate, rows dp_shard, columns cp and, inside, tp.

    Args:
        parallel: the sizes.
        ranks: the rank table of `plan.json`; its hosts are named on the cells.
    """
    copies = min(parallel.dp_replicate, _MOST_COPIES)
    rows = min(parallel.dp_shard, _MOST_ROWS)
    columns = min(parallel.cp * parallel.tp, _MOST_COLUMNS)
    across = _across(columns - 1, parallel.tp) + _CELL
    block_width = across + 2 * _GROUP_GAP
    block_height = rows * (_CELL + _GAP) - _GAP + 2 * _GROUP_GAP
    per_line = max(1, min(copies, 1000 // (block_width + _GROUP_GAP)))
    lines = -(-copies // per_line)
    width = per_line * (block_width + _GROUP_GAP) - _GROUP_GAP + 4
    height = lines * (block_height + _GROUP_GAP) - _GROUP_GAP + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mesh" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label={quoteattr(str(parallel))}>'
    ]
    for copy in range(copies):
        line, place = divmod(copy, per_line)
        x = 2 + place * (block_width + _GROUP_GAP)
        y = 2 + line * (block_height + _GROUP_GAP)
        parts.append(
            f'<rect class="group" x="{x}" y="{y}" width="{block_width}" '
            f'height="{block_height}" rx="12"/>'
        )
        parts.extend(_block(parallel, ranks, copy, rows, columns, x + _GROUP_GAP, y + _GROUP_GAP))
    parts.append("</svg>")
    return "\n".join(parts)


def hidden_ranks(parallel: ParallelPlan) -> int:
    """Ranks of a large mesh that the picture leaves out."""
    shown = (
        min(parallel.dp_replicate, _MOST_COPIES)
        * min(parallel.dp_shard, _MOST_ROWS)
        * min(parallel.cp * parallel.tp, _MOST_COLUMNS)
    )
    return parallel.world_size - shown


def _across(column: int, tp: int) -> int:
    """Horizontal place of a column; tp groups stand apart from each other."""
    return column * (_CELL + _GAP) + column // tp * (_GROUP_GAP - _GAP)


def _block(
    parallel: ParallelPlan,
    ranks: Sequence[Mapping[str, Any]],
    copy: int,
    rows: int,
    columns: int,
    left: int,
    top: int,
) -> Iterator[str]:
    width = parallel.cp * parallel.tp
    for row in range(rows):
        for column in range(columns):
            rank = (copy * parallel.dp_shard + row) * width + column
            place = ", ".join(f"{axis} {at}" for axis, at in parallel.coordinates(rank).items())
            host = f" on {ranks[rank]['host']}" if rank < len(ranks) else ""
            x = left + _across(column, parallel.tp)
            y = top + row * (_CELL + _GAP)
            yield (
                f"<g><title>rank {rank}{escape(host)}: {place}</title>"
                f'<rect class="rank" x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" rx="8"/>'
                f'<text x="{x + _CELL / 2}" y="{y + _CELL / 2 + 4.5}">{rank}</text></g>'
            )
