"""Draw docs/images/four-axes-*.svg; `--check` only compares."""

import sys
from collections.abc import Iterator
from pathlib import Path

from ndtrain.plan.plan import AXES, ParallelPlan

IMAGES = Path(__file__).resolve().parents[1] / "images"
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.small{font-size:11px;fill:#57606a}"
    ".box{fill:none;stroke:#8c959f;stroke-width:1}.rank{fill:#ddf4ff;stroke:#0969da}"
    ".held{fill:#0969da}.rest{fill:#d0d7de}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}"
    ".rank{fill:#121d2f;stroke:#4493f8}.held{fill:#4493f8}.rest{fill:#3d444d}}"
)


def page(width: int, height: int, label: str, parts: Iterator[str]) -> str:
    """A whole picture."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{label}">',
            f"<style>{STYLE}</style>",
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, *, anchor: str = "middle", kind: str = "") -> str:
    """One line of text."""
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}>{words}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'
    )


def grid() -> Iterator[str]:
    """Sixteen ranks: hosts are columns of boxes, the innermost axis stands side by side."""
    plan = ParallelPlan(2, 2, 2, 2)
    for rank in range(plan.world_size):
        place = plan.coordinates(rank)
        left = 30 + place["dp_replicate"] * 350 + place["dp_shard"] * 165
        x, y = left + place["tp"] * 70, 60 + place["cp"] * 60
        if place["cp"] == place["tp"] == 0:
            yield box(left - 8, 48, 156, 124, "box")
            yield text(left + 70, 192, f"dp_shard {place['dp_shard']}", kind="small")
        if place["dp_shard"] == place["cp"] == place["tp"] == 0:
            yield text(
                left + 152,
                24,
                f"host {place['dp_replicate']}: dp_replicate {place['dp_replicate']}",
            )
        yield box(x, y, 60, 46, "rank")
        yield text(x + 30, y + 20, f"rank {rank}")
        yield text(x + 30, y + 37, f"cp {place['cp']} tp {place['tp']}", kind="small")


HELD = {
    "dp_replicate": ((0, 0, 1, 1), (0, 0, 1, 0.5)),
    "dp_shard": ((0, 0, 1, 0.5), (0, 0, 1, 0.5)),
    "cp": ((0, 0, 1, 0.5), (0, 0, 0.5, 1)),
    "tp": ((0, 0, 0.5, 1), (0, 0, 1, 1)),
}
"""Axis -> what rank 0 of 2 holds of a weight matrix and of the rows (x, y, width, height)."""


def parts() -> Iterator[str]:
    """For each axis of size 2, the part of the weights and of the rows that the first rank has."""
    yield text(60, 62, "a weight", anchor="end")
    yield text(60, 172, "the rows", anchor="end")
    for column, axis in enumerate(AXES):
        left = 90 + column * 150
        yield text(left + 50, 22, axis)
        for row, held in enumerate(HELD[axis]):
            top = 36 + row * 110
            yield box(left, top, 100, 60, "rest")
            x, y, width, height = held
            yield box(left + x * 100, top + y * 60, width * 100, height * 60, "held")
        yield text(left + 50, 226, "tokens go right", kind="small")


def main() -> int:
    """Write or check both pictures; returns the exit code."""
    pictures = {
        "four-axes-grid.svg": page(720, 205, "Sixteen ranks on two hosts by axis", grid()),
        "four-axes-parts.svg": page(690, 240, "What a rank holds along each axis", parts()),
    }
    stale = []
    for name, picture in pictures.items():
        path = IMAGES / name
        if "--check" not in sys.argv:
            path.write_text(picture, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != picture:
            stale.append(name)
    if stale:
        print(f"stale: {', '.join(stale)}; run python docs/scripts/four_axes.py")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
