"""Trains a tiny model on a mesh with the real engine, saves it, and continues it on another."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ndtrain.data.batch import IGNORED, MicroBatch, StepBatch
from ndtrain.parallel.mesh import build_mesh
from ndtrain.parallel.runtime import Runtime
from ndtrain.plan.model_source import find_model
from ndtrain.plan.plan import ParallelPlan
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import Engine, assemble
from ndtrain.train.checkpoint import Checkpointer, find_checkpoint
from ndtrain.train.state import Progress
from ndtrain.train.step import accumulate_gradients, update

ROWS, TOKENS, VOCABULARY = 8, 24, 65
SAVED_AT, STEPS = 2, 4


@dataclass(frozen=True)
class Case:
    """A recipe and the mesh on which it starts."""

    recipe: Recipe
    plan: ParallelPlan


@dataclass
class Trace:
    """What a run looked like: numbers of each step, and a digest of the state at the save."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    digest: str = ""


def batch_of(step: int, plan: ParallelPlan, data_rank: int) -> StepBatch:
    """The rows of one step; which they are does not depend on the mesh."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=generator)
    targets = torch.cat([ids[:, 1:], torch.full((ROWS, 1), IGNORED)], dim=1)
    for row in range(ROWS):
        targets[row, : 2 * row] = IGNORED
    count = int((targets != IGNORED).sum())
    documents = torch.zeros_like(ids)
    positions = torch.arange(TOKENS).expand(ROWS, TOKENS).contiguous()
    row_ids = torch.arange(ROWS) + step * ROWS
    share = ROWS // plan.data_ranks
    own = slice(data_rank * share, (data_rank + 1) * share)
    half = share // 2 or 1
    whole = MicroBatch(ids[own], targets[own], positions[own], documents[own], row_ids[own])
    micro = tuple(
        MicroBatch(*(getattr(whole, name)[start : start + half] for name in vars(whole)))
        for start in range(0, share, half)
    )
    return StepBatch(micro, count, ROWS * TOKENS, step * ROWS, (step + 1) * ROWS, 0.0)


def build(case: Case) -> Engine:
    return assemble(
        case.recipe, find_model(case.recipe), build_mesh(case.plan, torch.device("cpu"))
    )


def train(engine: Engine, first: int, last: int, trace: Trace) -> None:
    for step in range(first, last):
        batch = batch_of(step, engine.mesh.plan, engine.mesh.data_rank)
        result = accumulate_gradients(engine, batch, step, 1.0)
        trace.losses.append(result.loss.item())
        trace.norms.append(result.grad_norm.item())
        update(engine, result)


def digest(engine: Engine) -> str:
    """Over every trained parameter and optimizer state, whole, bit for bit."""
    found = hashlib.sha256()
    for name, parameter in engine.model.named_parameters():
        if not parameter.requires_grad:
            continue
        tensors: dict[str, Any] = {"": parameter.detach(), **engine.optimizer.state[parameter]}
        for key in sorted(tensors):
            value = tensors[key]
            whole = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
            found.update(f"{name}.{key}{tuple(whole.shape)}".encode())
            # numpy knows no bf16
            found.update(whole.flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def runtime_of(rank: int, plan: ParallelPlan) -> Runtime:
    return Runtime(rank, plan.world_size, rank, torch.device("cpu"))


def unbroken(rank: int, cases: list[tuple[Path, Case]]) -> list[Trace]:
    """Train each case from start to end, saving in the middle without a pause."""
    traces = []
    for folder, case in cases:
        trace = Trace()
        engine = build(case)
        keeper = Checkpointer(
            folder,
            runtime=runtime_of(rank, case.plan),
            run_id="run",
            trained_only=case.recipe.adapter is not None,
        )
        train(engine, 0, SAVED_AT, trace)
        trace.digest = digest(engine)
        keeper.save(SAVED_AT, engine.trainable, engine.optimizer, Progress(SAVED_AT, 16))
        train(engine, SAVED_AT, STEPS, trace)
        keeper.close()
        traces.append(trace)
    return traces


def continued(rank: int, cases: list[tuple[Path, Case]]) -> list[Trace]:
    """Load each saved case on another mesh and train on to the end."""
    traces = []
    for folder, case in cases:
        trace = Trace()
        engine = build(case)
        keeper = Checkpointer(
            folder.parent / f"{folder.name}-continued",
            runtime=runtime_of(rank, case.plan),
            run_id="other",
        )
        progress = keeper.load(find_checkpoint(folder), engine.trainable, engine.optimizer)
        assert (progress.step, progress.position) == (SAVED_AT, 16)
        trace.digest = digest(engine)
        train(engine, SAVED_AT, STEPS, trace)
        keeper.close()
        traces.append(trace)
    return traces
