"""Hold every mesh of this machine's GPUs to one GPU, under NCCL.

    python benchmarks/mesh_check.py [--gpus 4] [--one-card] [--json meshes.json]

In fp32 over five optimizer steps, losses to 1e-4 relative; in bf16 over twenty, losses to 0.5 % and
gradient norms to 2 %. Prints one line a mesh; exit code 1 when one is further off. With
`--one-card` all ranks share one GPU.
"""

import argparse
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))


from mesh_cells import (
    SIZES,
    tiny_recipe,
    trace_cells,
    trace_cells_apart,
    with_mesh,
    write_rows,
)
from one_card import launch_on_one_card

from ndtrain.launch import launch
from ndtrain.plan.hardware import local_gpus
from ndtrain.plan.plan import AXES
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
    "llama all tokens on tp": {"tensor_sequence_parallel": False},
    "llama async tp": {"async_tensor_parallel": True},
    "qwen3 tied": {"architecture": "qwen3"},
    "llama lora packed": LORA,
}
WIDER = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
"""Wide enough for the kernels of bf16, and drawn as models are, so that rounding stays rounding."""
BF16 = {"bf16": True, "learning_rate": 1e-3, "sizes": {**SIZES, **WIDER}}
IN_BF16: dict[str, dict[str, Any]] = {
    "llama packed, bf16": {**KINDS["llama packed"], **BF16},
    "llama lora packed, bf16": {**LORA, **BF16},
    "llama packed compiled, bf16": {
        **KINDS["llama packed"],
        **BF16,
        "torch_compile": True,
        "async_tensor_parallel": True,
    },
}
DIFFERS_WITH = {
    "llama packed all-gather": AXES.index("cp"),
    "llama all tokens on tp": AXES.index("tp"),
    "llama async tp": AXES.index("tp"),
}
"""The axis without which a kind is another kind once more."""
STEPS = {"fp32": 5, "bf16": 20}
ALLOWED = {"fp32": (1e-4, 1e-3), "bf16": (0.005, 0.02)}
"""Relative, of losses and of gradient norms."""
ALONE = (1, 1, 1, 1)
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
    """All meshes of so many GPUs."""
    sizes = itertools.product(range(1, gpus + 1), repeat=4)
    return [mesh for mesh in sizes if math.prod(mesh) == gpus]


def differs(kind: str, mesh: Mesh) -> bool:
    """Whether a kind does anything of its own on a mesh."""
    return kind not in DIFFERS_WITH or mesh[DIFFERS_WITH[kind]] > 1


def mode_of(kind: str) -> str:
    """What a kind is computed in."""
    return "bf16" if "bf16" in kind else "fp32"


@dataclass(frozen=True)
class Difference:
    """How far a mesh is from one GPU, relative."""

    kind: str
    mesh: Mesh
    loss: float
    grad_norm: float

    def __str__(self) -> str:
        return f"{self.kind:27} {self.mesh}  loss {self.loss:.1e}  grad norm {self.grad_norm:.1e}"

    @property
    def is_allowed(self) -> bool:
        """Whether losses and gradient norms are as near as they must be."""
        loss, grad_norm = ALLOWED[mode_of(self.kind)]
        return self.loss <= loss and self.grad_norm <= grad_norm


def differences(
    kinds: Sequence[str],
    recipes: dict[str, Recipe],
    meshes: Sequence[Mesh],
    folder: Path,
    steps: int,
    start: Callable[..., int],
) -> Iterator[Difference]:
    """Of each of some kinds on each mesh, from one GPU."""
    # in a process of its own: a parent that has used CUDA can no longer fork
    references = trace_cells_apart(
        [with_mesh(recipes[kind], ALONE) for kind in kinds], folder, steps
    )
    alone = dict(zip(kinds, references, strict=True))
    cells = [(kind, mesh) for kind in kinds for mesh in meshes if differs(kind, mesh)]
    on_meshes = [with_mesh(recipes[kind], mesh) for kind, mesh in cells]
    traces = trace_cells(on_meshes, folder, steps, start)
    for (kind, mesh), trace in zip(cells, traces, strict=True):
        loss = furthest(trace.losses, alone[kind].losses)
        grad_norm = furthest(trace.grad_norms, alone[kind].grad_norms)
        yield Difference(kind, mesh, loss, grad_norm)


def furthest(found: tuple[float, ...], wanted: tuple[float, ...]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(one - other) / other for one, other in zip(found, wanted, strict=True))


def write_worst(path: Path, found: Sequence[Difference]) -> None:
    """The largest differences of each mode, and how many cells were compared."""
    worst = {}
    for mode in STEPS:
        own = [one for one in found if mode_of(one.kind) == mode]
        worst[f"{mode}_loss"] = max((one.loss for one in own), default=0.0)
        worst[f"{mode}_grad_norm"] = max((one.grad_norm for one in own), default=0.0)
    path.write_text(json.dumps({**worst, "cells": len(found)}), encoding="utf-8")


def main() -> int:
    """Run all kinds on all meshes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=0, help="default: all")
    parser.add_argument("--one-card", action="store_true", help="all ranks share one GPU")
    parser.add_argument("--only", nargs="+", choices=[*KINDS, *IN_BF16], help="these kinds")
    parser.add_argument("--json", type=Path, help="where the numbers go, after each mode")
    parser.add_argument("--tiny", action="store_true", help="two kinds, a few steps, on CPU")
    options = parser.parse_args()
    gpus = options.gpus or len(local_gpus())
    meshes, steps = meshes_of(gpus), STEPS
    kinds = options.only or [*KINDS, *IN_BF16]
    if options.tiny:
        kinds, meshes = ["llama packed", "llama packed, bf16"], [(1, gpus, 1, 1)]
        steps = {"fp32": 2, "bf16": 2}
    start = launch_on_one_card if options.one_card else launch
    found: list[Difference] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write_rows(folder / "rows.jsonl", rows=200)
        recipes = recipes_of(rows, "cpu" if options.tiny else "auto")
        for mode in STEPS:
            own = [kind for kind in kinds if mode_of(kind) == mode]
            if not own:
                continue
            for one in differences(own, recipes, meshes, folder, steps[mode], start):
                print(one, flush=True)
                found.append(one)
            if options.json:
                write_worst(options.json, found)
    return int(not all(one.is_allowed for one in found))


if __name__ == "__main__":
    sys.exit(main())
