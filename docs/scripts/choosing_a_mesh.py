"""Draws the plots of docs/choosing-a-mesh.md and writes its tables.

Run it after the planner changed.

python docs/scripts/choosing_a_mesh.py          rewrite the page's tables and pictures
python docs/scripts/choosing_a_mesh.py --check  only say whether they are up to date
"""

import re
import sys
from dataclasses import replace
from pathlib import Path

from ndtrain.plan.book import facts_from_book
from ndtrain.plan.chart import short_number
from ndtrain.plan.hardware import build_cluster, calibration, find_link
from ndtrain.plan.plan import ParallelPlan
from ndtrain.plan.plot import draw_study
from ndtrain.plan.search import search
from ndtrain.plan.studies import (
    Study,
    best_speed,
    first_above,
    memory_over_length,
    memory_over_size,
)
from ndtrain.recipe.schema import Recipe

DOCS = Path(__file__).resolve().parent.parent
PAGE = DOCS / "choosing-a-mesh.md"
WORLDS = (1, 8, 32, 256)
MODEL = "meta-llama/Llama-3.1-8B"
GPU = "h100-80"
LENGTH = 8192
RECIPE = Recipe(base_model=MODEL, learning_rate=1e-5, sequence_len=LENGTH)
LINKS = ("ethernet-25", "ethernet-100", "pcie4", "pcie5", "nvlink3", "nvlink4", "nvlink5")


def study(world: int) -> Study:
    return Study(RECIPE, build_cluster(GPU, world_size=world), calibration())


def size_table() -> str:
    """Largest model that fits, by mesh."""
    rows = ["| GPUs | replicate only | one node a copy | shard over all | shard × tp 8 |"]
    rows.append("|---|---|---|---|---|")
    for world in WORLDS:
        node = min(world, 8)
        meshes = (
            ParallelPlan(dp_replicate=world),
            ParallelPlan(world // node, node),
            ParallelPlan(1, world),
            ParallelPlan(1, world // node, 1, node),
        )
        cells = []
        for mesh in meshes:
            edge = first_above(memory_over_size(study(world), mesh, LENGTH), study(world).limit)
            cells.append(short_number(edge) if edge else "all drawn")
        rows.append(f"| {world} | {' | '.join(cells)} |")
    return "\n".join(rows)


def length_table() -> str:
    """Longest row that fits, by context-parallel size."""
    facts = facts_from_book(MODEL)
    assert facts is not None
    sizes = (1, 2, 4, 8, 16)
    rows = ["| GPUs | whole rows | cp 2 | cp 4 | cp 8 | cp 16 |", "|---|---|---|---|---|---|"]
    for world in WORLDS:
        cells = []
        for cp in sizes:
            if world % cp:
                cells.append("-")
                continue
            mesh = ParallelPlan(1, world // cp, cp)
            edge = first_above(memory_over_length(study(world), facts, mesh), study(world).limit)
            cells.append(_length(edge))
        rows.append(f"| {world} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _length(edge: float | None) -> str:
    if edge is None:
        return "> 2M"
    return "does not fit" if edge <= 2048 else short_number(edge)


def link_table() -> str:
    """Speed with tensor parallelism relative to sharding alone, by link."""
    facts = facts_from_book(MODEL)
    assert facts is not None
    rows = [
        "| link inside the node | GB/s | shard 8 | shard 4 × tp 2 | shard 2 × tp 4 | tp 8 |",
        "|---|---|---|---|---|---|",
    ]
    base = study(8)
    for name in LINKS:
        link = find_link(name, "")
        there = replace(base, cluster=replace(base.cluster, intra=link))
        speeds = [
            best_speed(there, facts, ParallelPlan(1, 8 // tp, 1, tp), LENGTH) for tp in (1, 2, 4, 8)
        ]
        first = speeds[0] or 1.0
        cells = [f"{speed / first:.0%}" if speed else "-" for speed in speeds[1:]]
        gbs = there.cluster.gbs_over(8)
        rows.append(f"| {name} | {gbs:g} | {first:,.0f} tokens/s/GPU | {' | '.join(cells)} |")
    return "\n".join(rows)


def best_table() -> str:
    """The first choice of `ndtrain plan` for some models and numbers of GPUs."""
    rows = ["| model | GPUs | length | first choice | micro-batch, recompute | tokens/s/GPU |"]
    rows.append("|---|---|---|---|---|---|")
    cases = (
        ("meta-llama/Llama-3.2-1B", 8, 8192),
        ("meta-llama/Llama-3.1-8B", 8, 8192),
        ("meta-llama/Llama-3.1-8B", 8, 131072),
        ("meta-llama/Llama-3.1-8B", 32, 8192),
        ("Qwen/Qwen3-32B", 32, 8192),
        ("meta-llama/Llama-3.1-70B", 32, 8192),
        ("meta-llama/Llama-3.1-70B", 256, 8192),
        ("meta-llama/Llama-3.1-70B", 256, 131072),
        ("meta-llama/Llama-3.1-405B", 256, 8192),
    )
    for model, world, length in cases:
        facts = facts_from_book(model)
        assert facts is not None
        recipe = RECIPE.model_copy(update={"sequence_len": length})
        best = search(recipe, facts, build_cluster(GPU, world_size=world), calibration())[0]
        sizes = zip(("replicate", "shard", "cp", "tp"), best.parallel.sizes, strict=True)
        mesh = " × ".join(f"{name} {size}" for name, size in sizes if size > 1)
        setting = f"{best.setting.micro_batch}, {best.setting.policy}"
        speed = f"{best.tokens_per_second_per_gpu:,.0f}" if best.fits else "does not fit"
        name = model.rsplit("/", 1)[-1]
        rows.append(f"| {name} | {world} | {length:,} | {mesh} | {setting} | {speed} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """The page with fresh tables between its markers."""
    tables = {
        "sizes": size_table(),
        "lengths": length_table(),
        "links": link_table(),
        "choices": best_table(),
    }
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = pattern.sub(lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text)
    return text


def pictures() -> dict[Path, str]:
    facts = facts_from_book(MODEL)
    assert facts is not None
    return {
        DOCS / "images" / f"choosing-a-mesh-{world}.svg": draw_study(study(world), facts, LENGTH)
        for world in WORLDS
    }


def main() -> int:
    files = {PAGE: page(PAGE.read_text(encoding="utf-8")), **pictures()}
    stale = [
        path
        for path, text in files.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path} is out of date: run python docs/scripts/choosing_a_mesh.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(files[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
