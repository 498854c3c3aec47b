"""How near predictions come to runs that were measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ndtrain.errors import MeshError
from ndtrain.plan.book import facts_from_book
from ndtrain.plan.calibration import Calibration
from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.hardware import GIB, Cluster, build_cluster
from ndtrain.plan.memory import predict_memory
from ndtrain.plan.plan import ParallelPlan
from ndtrain.plan.setting import Precision, Setting
from ndtrain.plan.shapes import count_parameters, lora_parameters
from ndtrain.plan.step_time import predict_time

_CHUNKS = {"compiled": 4096, "in_place": 4096}
_CHUNK = 2048
"""Tokens of a chunk of logits where a run does not say: ours, and those before it."""
_STATES = {
    "fp32": Precision(),
    "bf16": Precision(2, 2, 4),
    "8bit": Precision(2, 2, 2),
}
"""Weights, gradients and moments: fp32, all in bf16, or bf16 with moments of 8 bits."""


@dataclass(frozen=True)
class MeasuredRun:
    """One run: what it was and what was measured.

    Attributes:
        tokens_per_second: of one GPU, padding left out; 0 where nobody said.
        memory_gib: what torch reserved; 0 where nobody said.
        fill: share of the trained rows that is not padding.
        note: what tells it from a run of the same setting.
    """

    table: str
    facts: ModelFacts
    setting: Setting
    cluster: Cluster
    tokens_per_second: float
    memory_gib: float
    fill: float = 1.0
    note: str = ""

    @property
    def label(self) -> str:
        """Short name for tables."""
        setting = self.setting
        words = [self.table, f"bs {setting.micro_batch} × {setting.sequence_len}", setting.policy]
        words += [f"tp {setting.parallel.tp}"] * (setting.parallel.tp > 1)
        words += [f"cp {setting.parallel.cp}"] * (setting.parallel.cp > 1)
        words += ["packed"] * (setting.document_len is not None)
        words += ["no reshard"] * (not setting.reshard) + ["loss compiled"] * (
            setting.loss_kernel == "compiled"
        )
        return ", ".join([*words, self.note] if self.note else words)


@dataclass(frozen=True)
class Prediction:
    """A run's predicted figures and how far off they are, as shares."""

    run: MeasuredRun
    memory_gib: float
    tokens_per_second: float

    @property
    def memory_error(self) -> float:
        """Positive: predicted more than measured."""
        return self.memory_gib / self.run.memory_gib - 1

    @property
    def time_error(self) -> float:
        """Of the step's seconds; positive: predicted slower than measured."""
        return self.run.tokens_per_second / self.tokens_per_second - 1


def read_runs(path: Path, gpu: str = "h200") -> list[MeasuredRun]:
    """The runs of a file such as tests/unit/plan/data/measured_runs.yaml."""
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))["runs"]
    return [_run(row, gpu) for row in rows]


def predict(run: MeasuredRun, constants: Calibration) -> Prediction:
    """What planning says of a run."""
    memory = predict_memory(run.facts, run.setting, constants).reserved / GIB
    seconds = predict_time(run.facts, run.setting, run.cluster, constants).total
    ranks = run.setting.parallel.world_size
    return Prediction(run, memory, run.fill * run.setting.step_tokens / seconds / ranks)


def ordered_alike(predictions: Sequence[Prediction]) -> bool:
    """Whether the runs of one table stand in the same order by predicted and measured speed."""
    by_measure = sorted(predictions, key=lambda p: p.run.tokens_per_second)
    speeds = [prediction.tokens_per_second for prediction in by_measure]
    return speeds == sorted(speeds)


def _run(row: Mapping[str, Any], gpu: str) -> MeasuredRun:
    facts = facts_from_book(row["model"])
    if facts is None:
        raise MeshError(f"'{row['model']}' is not in the model book.", where=row["table"])
    facts = replace(facts, vocab_size=row.get("vocab_size", facts.vocab_size))
    gpus, tp, cp = (row.get(key, 1) for key in ("gpus", "tp", "cp"))
    rank = row.get("lora_rank", 0)
    mesh = ParallelPlan(dp_shard=gpus, tp=tp, cp=cp, cp_method="ulysses" if cp > 1 else "none")
    setting = Setting(
        parallel=mesh,
        micro_batch=row["micro_batch"],
        accumulation=row.get("accumulation", 1),
        sequence_len=row["sequence_len"],
        policy=row["policy"],
        precision=_STATES[row.get("states", "fp32")],
        steps_early=row.get("steps_early", False),
        trained=0 if rank else count_parameters(facts),
        adapters=lora_parameters(facts, rank) if rank else 0,
        lora_rank=rank,
        shares_inputs=row.get("shares_inputs", False),
        reshard=row.get("reshard", True),
        compiled=row.get("compiled", True),
        recompute_inside=row.get("recompute_inside", False),
        loss_chunk=row.get("loss_chunk", _CHUNKS.get(row.get("loss", ""), _CHUNK)),
        sums_head="loss_chunk" not in row,
        own_shards=row.get("own_shards", False),
        document_len=row.get("document_len"),
        loss_kernel=row.get("loss", "cross_entropy"),
    )
    return MeasuredRun(
        table=row["table"],
        facts=facts,
        setting=setting,
        cluster=build_cluster(row.get("gpu", gpu), world_size=mesh.world_size),
        tokens_per_second=row["tokens_per_second"],
        memory_gib=row.get("memory_gib", 0.0),
        fill=row.get("fill", 1.0),
        note=row.get("note", ""),
    )
