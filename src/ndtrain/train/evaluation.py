"""One rank of an evaluation: the model on its mesh, a checkpoint, the loss of each dataset."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from ndtrain.data.prepare import open_prepared
from ndtrain.environment import LaunchedRank
from ndtrain.errors import ExitCode
from ndtrain.parallel.mesh import build_mesh
from ndtrain.parallel.runtime import Runtime, limit_waits, start, stop
from ndtrain.plan.model_source import ModelSource
from ndtrain.plan.plan import Plan
from ndtrain.recipe.schema import Recipe
from ndtrain.report.atomic import replace_text, write_failure
from ndtrain.train.assemble import assemble
from ndtrain.train.checkpoint_files import FoundCheckpoint
from ndtrain.train.checkpoint_load import load_tensors
from ndtrain.train.feed import build_evals
from ndtrain.train.probe import check_untested
from ndtrain.train.step import evaluation_loss


@dataclass(frozen=True)
class EvaluationJob:
    """What every rank gets.

    Attributes:
        checkpoint: None evaluates the base model.
        folder: where logs and result.json go.
    """

    recipe: Recipe
    plan: Plan
    source: ModelSource
    prepared: Path
    num_tokens: int
    checkpoint: FoundCheckpoint | None
    folder: Path


@dataclass(frozen=True)
class DatasetLoss:
    """The result of one dataset: mean loss over its trained tokens."""

    rows: int
    tokens: int
    loss: float

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinite where a float cannot hold it."""
        return math.exp(self.loss) if self.loss < math.log(1e300) else math.inf


def evaluate_rank(job: EvaluationJob, launched: LaunchedRank | None) -> int:
    """One rank from its process group to its exit code."""
    recipe = job.recipe
    runtime = start(launched, device=recipe.device, timeout_seconds=recipe.ddp_timeout)
    failed = True
    try:
        results = measure(job, runtime)
        if runtime.is_main:
            for line in result_lines(results):
                print(line)
            _keep(job, results)
        failed = False
    finally:
        stop(runtime, failed=failed)
    return ExitCode.OK


def measure(job: EvaluationJob, runtime: Runtime) -> dict[str, DatasetLoss]:
    """The loss of every held-out dataset; all ranks call it and get the same numbers."""
    mesh = build_mesh(job.plan.parallel, runtime.device)
    limit_waits(runtime)
    engine = assemble(job.recipe, job.source, mesh, num_tokens=job.num_tokens)
    if job.checkpoint is not None:
        group = dist.new_group(backend="gloo")
        load_tensors(job.checkpoint, engine.trainable, None, runtime, group)
    check_untested(engine)
    prepared = open_prepared(job.prepared)
    results = {}
    for name, batches in build_evals(prepared, job.recipe, engine).items():
        loss, tokens = evaluation_loss(engine, batches())
        results[name] = DatasetLoss(len(prepared.evals[name]), tokens, loss)
    return results


def total_loss(results: Mapping[str, DatasetLoss]) -> DatasetLoss:
    """All datasets together, each trained token counted once."""
    tokens = sum(one.tokens for one in results.values())
    loss = sum(one.loss * one.tokens for one in results.values()) / max(1, tokens)
    return DatasetLoss(sum(one.rows for one in results.values()), tokens, loss)


def result_lines(results: Mapping[str, DatasetLoss]) -> Iterator[str]:
    """A small table; with several datasets, the last line is all of them."""
    shown = dict(results)
    if len(results) > 1:
        shown["all"] = total_loss(results)
    width = max(map(len, ["dataset", *shown]))
    yield f"{'dataset':<{width}}  {'rows':>8}  {'tokens':>10}  {'loss':>8}  {'perplexity':>10}"
    for name, one in shown.items():
        yield (
            f"{name:<{width}}  {one.rows:>8,}  {one.tokens:>10,}  {one.loss:>8.4f}  "
            f"{one.perplexity:>10.4g}"
        )


def _keep(job: EvaluationJob, results: Mapping[str, DatasetLoss]) -> None:
    """Leave the numbers in full precision for scripts."""
    found = job.checkpoint
    content = {
        "v": 1,
        "checkpoint": str(found.path) if found else None,
        "step": found.step if found else 0,
        "datasets": {name: asdict(one) for name, one in results.items()},
        "loss": total_loss(results).loss,
    }
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_failure(job.folder, error) from error
    replace_text(job.folder / "result.json", json.dumps(content, indent=2) + "\n")
