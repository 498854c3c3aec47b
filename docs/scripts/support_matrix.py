"""Write docs/reference/support-matrix.md from the report of a test run: RESULTS.xml [PAGE]."""

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

PAGE = Path(__file__).resolve().parents[1] / "reference" / "support-matrix.md"
Mesh = tuple[int, ...]

MESHES: tuple[Mesh, ...] = (
    *itertools.islice(itertools.product((1, 2), repeat=4), 1, None),
    (1, 3, 1, 1),
    (1, 4, 1, 1),
    (1, 1, 4, 1),
    (1, 1, 1, 4),
)
FEW: tuple[Mesh, ...] = ((1, 1, 1, 2), (1, 2, 1, 2), (1, 2, 2, 1), (2, 1, 1, 2))
PACKAGES = ("torch", "transformers", "peft")

COLUMNS: dict[str, dict[str, Any]] = {
    "rows": {"packed": False, "adapter": "none"},
    "packed": {"packed": True, "adapter": "none", "cp_method": "auto"},
    "packed, all-gather": {"packed": True, "adapter": "none", "cp_method": "allgather"},
    "LoRA": {"packed": True, "adapter": "lora"},
    "DoRA": {"packed": True, "adapter": "dora"},
    "QLoRA": {"packed": False, "adapter": "qlora"},
}
MAIN = ("llama", "qwen3")
"""The architectures of which every mesh is tested."""

INTRO = """\
# Support matrix

Written by `docs/scripts/support_matrix.py` from the report of a test run (`make test-all` leaves
one, `make support-matrix` reads it); do not edit. This run proved {passed} cells on {when}, on CPU
with {versions}.

A cell is proved when the same rows, on that mesh and in one process, give the same losses (to
1e-5), gradient norms (to 1e-4) and parameters after five AdamW steps (to 1e-4), in fp32, through
the assembly that `ndtrain train` uses. *all* stands for {main}; qwen3's embeddings are tied, and
with packed rows its blocks are recomputed. LoRA and DoRA adapt q, k, v, o, gate, up, down and the
head, QLoRA all of llama's linears except the head; a 4-bit base is refused with tp. A dash means
that the cell was not in that test run. Sizes are dp_replicate, dp_shard, cp, tp.

## Every mesh
"""

OTHERS = """
How to read the two columns on the right:

- **Accelerate 1.15** is what we met when we tried its own guide to several axes with transformers
  5.24. *same*: the numbers of one process. *GPU, unpacked*: needs CUDA's attention kernels, and
  documents of a packed row see each other without a word. *raises*: stops with an error from inside
  the libraries. *refused*: stops by design. *same* holds for a loss weighted by tokens by hand; the
  mean that its guide shows differs where ranks have unequal numbers of trained tokens.
- **Axolotl** is what its page on several axes documents, marked beta there. *not listed*: its table
  says nothing of this combination. It refuses tied embeddings with tp.
"""

ACCELERATE: dict[Mesh, str] = {
    **dict.fromkeys(
        [
            (1, 2, 1, 1),
            (1, 4, 1, 1),
            (2, 1, 1, 1),
            (2, 2, 1, 1),
            (1, 1, 1, 2),
            (1, 1, 1, 4),
        ],
        "same",
    ),
    **dict.fromkeys([(1, 1, 2, 1), (1, 1, 4, 1), (1, 2, 2, 1), (2, 2, 2, 1)], "GPU, unpacked"),
    **dict.fromkeys(
        [(1, 2, 1, 2), (1, 1, 2, 2), (1, 2, 2, 2), (2, 2, 1, 2), (2, 2, 2, 2)], "raises"
    ),
    **dict.fromkeys([(2, 1, 1, 2), (2, 1, 2, 1), (2, 1, 2, 2)], "refused"),
}


def axolotl(mesh: Mesh) -> str:
    """What Axolotl's page says of a mesh."""
    replicate, shard, cp, tp = (size > 1 for size in mesh)
    if replicate and not shard and (cp or tp):
        return "refused"
    listed = (
        (shard and not replicate)
        or (replicate and shard and not cp)
        or (not shard and not replicate and cp != tp)
    )
    return "yes" if listed else "not listed"


def proved(report: ElementTree.Element) -> Iterator[dict[str, Any]]:
    """The cells that passed, also those of a test that failed at a later one."""
    for one in report.iter("property"):
        if one.get("name") == "mesh-cell":
            yield json.loads(one.get("value", ""))


def matching(cells: Iterable[dict[str, Any]], mesh: Mesh, wanted: dict[str, Any]) -> list[str]:
    """The architectures of which a cell passed."""
    found = {
        cell["architecture"]
        for cell in cells
        if tuple(cell["mesh"]) == mesh and all(cell[key] == value for key, value in wanted.items())
    }
    return sorted(found)


def mesh_table(cells: list[dict[str, Any]]) -> Iterator[str]:
    """A row for each mesh."""
    yield f"| mesh | ranks | {' | '.join(COLUMNS)} | Accelerate 1.15 | Axolotl |"
    yield "|---" * (4 + len(COLUMNS)) + "|"
    for mesh in MESHES:
        columns = []
        for wanted in COLUMNS.values():
            names = [name for name in matching(cells, mesh, wanted) if name in MAIN]
            columns.append("all" if len(names) == len(MAIN) else ", ".join(names) or "–")
        beside = f"{ACCELERATE.get(mesh, 'not tried')} | {axolotl(mesh)}"
        yield f"| {', '.join(map(str, mesh))} | {prod(mesh)} | {' | '.join(columns)} | {beside} |"


def architecture_table(cells: list[dict[str, Any]]) -> Iterator[str]:
    """A row for each architecture, over the four meshes that all of them are tested on."""
    yield "\n## Every architecture\n\nPacked rows, all parameters trained.\n"
    yield f"| architecture | {' | '.join(', '.join(map(str, mesh)) for mesh in FEW)} |"
    yield "|---" * (1 + len(FEW)) + "|"
    for name in sorted({cell["architecture"] for cell in cells}):
        marks = [
            "same" if name in matching(cells, mesh, COLUMNS["packed"]) else "–" for mesh in FEW
        ]
        yield f"| `{name}` | {' | '.join(marks)} |"


def page(report: ElementTree.Element) -> str:
    """The whole page."""
    cells = list(proved(report))
    suite = next(report.iter("testsuite"))
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in PACKAGES)
    intro = INTRO.format(
        when=suite.get("timestamp", "")[:10],
        passed=len(cells),
        versions=versions,
        main=" and ".join(MAIN),
    )
    tables = [*mesh_table(cells), OTHERS.rstrip(), *architecture_table(cells)]
    return intro + "\n" + "\n".join(tables) + "\n"


def main(arguments: list[str]) -> None:
    """Read the report, write the page."""
    if not arguments:
        sys.exit(__doc__)
    text = page(ElementTree.parse(arguments[0]).getroot())
    target = Path(arguments[1]) if arguments[1:] else PAGE
    target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
