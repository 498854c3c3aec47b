"""Hold every mesh of this machine's GPUs to one GPU, under NCCL.

    python benchmarks/mesh_check.py [--gpus 4] [--json meshes.json]

In fp32 over five optimizer steps, losses to 1e-4 relative; in bf16 over twenty, losses to 0.5 % and
gradient norms to 2 %. Prints one line a mesh; exit code 1 when one is further off.
"""

import argparse
import itertools
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))


from mesh_cells import SIZES, Trace, tiny_recipe, trace_cells, with_mesh, write_rows

from ndtrain.plan.hardware import local_gpus
from ndtrain.recipe.schema import Recipe

LORA: dict[str, Any] = {
    "sample_packing": True,
    "adapter": "lora",
    "lora_target_linear": True,
    "lora_dropout": 0.1,
}
FLEXIBLE = {**SIZES, "head_dim": 16}
"""Heads as wide as FlexAttention asks for, which reads packed rows in fp32."""

KINDS: dict[str, dict[str, Any]] = {
    "llama packed": {"sample_packing": True, "sizes": FLEXIBLE},
    "llama packed all-gather": {
        "sample_packing": True,
        "context_parallel_method": "allgather",
        "sizes": FLEXIBLE,
    },
    "qwen3 tied": {"architecture": "qwen3"},
    "llama lora packed": LORA,
}
WIDER = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
"""Wide enough for the kernels of bf16, and drawn as models are, so that rounding stays rounding."""
IN_BF16 = {
    f"{name}, bf16": {
        **KINDS[name],
        "bf16": True,
        "learning_rate": 1e-3,
        "sizes": {**SIZES, **WIDER},
    }
    for name in ("llama packed", "llama lora packed")
}
STEPS = {"fp32": 5, "bf16": 20}
ALLOWED = {"fp32": (1e-4, 1e-3), "bf16": (0.005, 0.02)}
"""Relative, of losses and of gradient norms."""
Mesh = tuple[int, int, int, int]


def recipes_of(rows: Path, device: str) -> dict[str, Recipe]:
    """One recipe a kind, on no mesh yet."""
    found = {}
    for kind, keys in (KINDS | IN_BF16).items():
        options = {"device": device, "bf16": False, "torch_compile": False, **keys}
        architecture = options.pop("architecture", "llama")
        found[kind] = tiny_recipe(rows, architecture, **options)
    return found


def meshes_of(gpus: int) -> list[Mesh]:
    """All meshes of so many GPUs, and one GPU alone."""
    sizes = itertools.product(range(1, gpus + 1), repeat=4)
    return [mesh for mesh in sizes if math.prod(mesh) in (1, gpus)]


def mode_of(kind: str) -> str:
    """What a kind is computed in."""
    return "bf16" if "bf16" in kind else "fp32"


def trace_all(
    recipes: dict[str, Recipe], meshes: list[Mesh], folder: Path, steps: dict[str, int]
) -> dict[tuple[str, Mesh], Trace]:
    """The traces of every kind on every mesh."""
    traces: dict[tuple[str, Mesh], Trace] = {}
    # one GPU comes last: a parent that has used CUDA can no longer fork
    for world in sorted({math.prod(mesh) for mesh in meshes}, reverse=True):
        for mode in STEPS:
            cells = [
                (kind, mesh)
                for kind in recipes
                for mesh in meshes
                if math.prod(mesh) == world and mode_of(kind) == mode
            ]
            meshed = [with_mesh(recipes[kind], mesh) for kind, mesh in cells]
            found = trace_cells(meshed, folder, steps[mode])
            traces |= dict(zip(cells, found, strict=True))
    return traces


def furthest(found: tuple[float, ...], wanted: tuple[float, ...]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(one - other) / other for one, other in zip(found, wanted, strict=True))


def main() -> int:
    """Run all kinds on all meshes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=0, help="default: all")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--tiny", action="store_true", help="two kinds, a few steps, on CPU")
    options = parser.parse_args()
    gpus = options.gpus or len(local_gpus())
    worst = {f"{mode}_{what}": 0.0 for mode in STEPS for what in ("loss", "grad_norm")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write_rows(folder / "rows.jsonl", rows=200)
        recipes = recipes_of(rows, "cpu" if options.tiny else "auto")
        meshes, steps = meshes_of(gpus), STEPS
        if options.tiny:
            recipes = {kind: recipes[kind] for kind in ("llama packed", "llama packed, bf16")}
            meshes, steps = [(1, 1, 1, 1), (1, gpus, 1, 1)], {"fp32": 2, "bf16": 2}
        traces = trace_all(recipes, meshes, folder, steps)
    for (kind, mesh), trace in traces.items():
        alone, mode = traces[kind, (1, 1, 1, 1)], mode_of(kind)
        loss = furthest(trace.losses, alone.losses)
        norm = furthest(trace.grad_norms, alone.grad_norms)
        worst[f"{mode}_loss"] = max(worst[f"{mode}_loss"], loss)
        worst[f"{mode}_grad_norm"] = max(worst[f"{mode}_grad_norm"], norm)
        print(f"{kind:26} {mesh}  loss {loss:.1e}  grad norm {norm:.1e}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({**worst, "cells": len(traces)}), encoding="utf-8")
    pairs = [(worst[f"{mode}_loss"], worst[f"{mode}_grad_norm"]) for mode in STEPS]
    within = [
        loss <= allowed[0] and norm <= allowed[1]
        for (loss, norm), allowed in zip(pairs, ALLOWED.values(), strict=True)
    ]
    return int(not all(within))


if __name__ == "__main__":
    sys.exit(main())
