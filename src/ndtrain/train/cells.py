"""Short traced runs on given meshes, one mesh after another in one set of processes.

This is how a mesh is compared with one process: each cell is assembled, fed and stepped exactly as
`ndtrain train` does it, and leaves its losses, gradient norms and parameters behind.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ndtrain.data.batch import IGNORED
from ndtrain.data.prepare import open_prepared
from ndtrain.data.token_rows import TokenRows
from ndtrain.data.tokens import Ids
from ndtrain.environment import LaunchedRank
from ndtrain.parallel.mesh import Mesh, build_mesh
from ndtrain.parallel.runtime import start, stop
from ndtrain.plan.model_source import ModelSource
from ndtrain.plan.plan import ParallelPlan, Plan
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import Engine, assemble
from ndtrain.train.feed import build_batches
from ndtrain.train.gather import gather_whole
from ndtrain.train.optim import learning_rate_factor
from ndtrain.train.step import accumulate_gradients, update


@dataclass(frozen=True)
class Cell:
    """One short run on one mesh.

    Attributes:
        prepared: folder of the tokenised rows.
        vocab_size: ids are folded into it, None leaves them as they are.
        longest: rows are cut to it, None leaves them as they are.
    """

    recipe: Recipe
    source: ModelSource
    plan: Plan
    prepared: Path
    steps: int
    vocab_size: int | None = None
    longest: int | None = None


@dataclass(frozen=True)
class Trace:
    """What a cell left behind; parameters are whole tensors by name, on the main rank only."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    parameters: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class CellsJob:
    """Cells of one world size, and the folder their traces go to."""

    cells: tuple[Cell, ...]
    folder: Path

    def trace(self, number: int) -> Trace:
        """The trace of a cell that has run."""
        found = torch.load(self.folder / f"cell-{number}.pt", weights_only=True)
        return Trace(tuple(found["losses"]), tuple(found["grad_norms"]), found["parameters"])


class SmallRows(TokenRows):
    """Rows cut to a length, with token ids folded into a smaller vocabulary.

    The end of a row is kept, because that is where the answers are.
    """

    def __init__(self, rows: TokenRows, vocab_size: int | None, longest: int | None) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._longest = longest
        self.lengths = rows.lengths
        self.target_counts = rows.target_counts
        if longest is not None:
            self.lengths = np.minimum(rows.lengths, longest)
            counts = (
                np.count_nonzero(self.row(number)[1][1:] != IGNORED) for number in range(len(rows))
            )
            self.target_counts = np.fromiter(counts, dtype=np.int32, count=len(rows))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> tuple[Ids, Ids]:
        """Ids and labels, both folded and cut alike."""
        ids, labels = self._rows.row(number)
        if self._longest is not None:
            ids, labels = ids[-self._longest :], labels[-self._longest :]
        if self._vocab_size is None:
            return ids, labels
        folded = labels.copy()
        folded[labels >= 0] %= self._vocab_size
        return ids % self._vocab_size, folded


class Meshes:
    """The meshes of one process group; those of equal sizes share what they cost to connect.

    Args:
        device: this rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._built: dict[tuple[int, ...], Mesh] = {}

    def of(self, plan: ParallelPlan) -> Mesh:
        """The mesh of a plan with as many ranks as the group."""
        if plan.sizes not in self._built:
            self._built[plan.sizes] = build_mesh(plan, self._device)
        return replace(self._built[plan.sizes], plan=plan)


def run_cell(cell: Cell, meshes: Meshes) -> Trace:
    """Run one cell over the existing process group."""
    return trace_steps(cell, assemble(cell.recipe, cell.source, meshes.of(cell.plan.parallel)))


def trace_steps(cell: Cell, engine: Engine) -> Trace:
    """Take a cell's steps with an engine that was assembled for it."""
    rows = open_prepared(cell.prepared).train
    if cell.vocab_size is not None or cell.longest is not None:
        rows = SmallRows(rows, cell.vocab_size, cell.longest)
    batches = build_batches(rows, cell.recipe, cell.plan.batch, engine, shuffle=True)
    losses, norms, position = [], [], 0
    for step in range(cell.steps):
        batch = batches.at(position)
        position = batch.next_position
        factor = learning_rate_factor(cell.recipe, step, cell.steps)
        result = accumulate_gradients(engine, batch, step, factor)
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
        update(engine, result)
    return Trace(tuple(losses), tuple(norms), whole_parameters(engine))


def whole_parameters(engine: Engine) -> dict[str, torch.Tensor]:
    """All parameters, whole, on the main rank's host; every rank calls it."""
    gathered = {name: gather_whole(one) for name, one in engine.model.named_parameters()}
    return {name: one.cpu().clone() for name, one in gathered.items() if one is not None}


def run_cells(job: CellsJob, launched: LaunchedRank | None) -> int:
    """Run all cells of a job on this rank; the main rank writes the traces."""
    first = job.cells[0].recipe
    runtime = start(launched, device=first.device, timeout_seconds=first.ddp_timeout)
    failed = True
    try:
        meshes = Meshes(runtime.device)
        for number, cell in enumerate(job.cells):
            trace = run_cell(cell, meshes)
            if runtime.is_main:
                save_trace(trace, job.folder, number)
        failed = False
    finally:
        stop(runtime, failed=failed)
    return 0


def save_trace(trace: Trace, folder: Path, number: int) -> None:
    """Write the trace of a cell to where its job looks for it."""
    content = {
        "losses": trace.losses,
        "grad_norms": trace.grad_norms,
        "parameters": dict(trace.parameters),
    }
    torch.save(content, folder / f"cell-{number}.pt")
