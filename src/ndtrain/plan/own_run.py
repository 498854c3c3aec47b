"""What is predicted of one run on the machine that starts it, written down before its first step.

`plan.json` keeps it; when the run has ended the measurement stands beside it.
"""

from dataclasses import dataclass, replace
from typing import Any

from ndtrain.plan.calibration import Calibration
from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.hardware import GIB, Cluster, calibration
from ndtrain.plan.machines import cluster_here
from ndtrain.plan.memory import MemorySplit
from ndtrain.plan.plan import Plan
from ndtrain.plan.search import evaluate, setting_on
from ndtrain.plan.setting import Setting
from ndtrain.plan.step_time import predict_time
from ndtrain.recipe.schema import Recipe


@dataclass(frozen=True)
class RowLengths:
    """Tokens of the rows a run trains on, once they are known.

    Attributes:
        longest: of the longest row that is trained, which decides the memory.
        mean: of a row on average, padding included, which decides the speed.
        document: of a document as attention feels it; None where a row is one document.
    """

    longest: int
    mean: float
    document: float | None


@dataclass(frozen=True)
class OwnRun:
    """A run's prediction.

    Attributes:
        facts: sizes of the model.
        setting: how its largest micro-batch is trained.
        memory: of one rank at its peak.
        seconds: of a step; None where nobody knows the machine's rates.
    """

    facts: ModelFacts
    setting: Setting
    cluster: Cluster
    constants: Calibration
    memory: MemorySplit
    seconds: float | None

    @property
    def memory_gib(self) -> float:
        """What `memory_gib` of a step will come to: torch's pool on a GPU, the process on a host.

        A process counts the libraries it has loaded, which stand in `context`.
        """
        return (self.memory.reserved if self.cluster.has_gpus else self.memory.total) / GIB

    def to_json(self) -> dict[str, Any]:
        """What `plan.json` keeps: bytes by part, and the two sums a run is measured by."""
        parts = dict(vars(self.memory))
        if not self.cluster.has_gpus:
            # Its loaded libraries are part of a process, which is what is measured on a host.
            parts["process"] = parts.pop("context")
        return {
            "memory": parts,
            "predicted": {
                "device": self.cluster.gpu.name,
                "rates": self.cluster.rates,
                "memory_gib": self.memory_gib,
                "step_seconds": self.seconds,
            },
        }


def predict_own_run(
    recipe: Recipe, plan: Plan, *, nodes: int = 1, rows: RowLengths | None = None
) -> OwnRun | None:
    """What a run needs here; None where the model's sizes or the GPUs are not known.

    Args:
        nodes: machines that start the same command.
        rows: lengths of the prepared rows; None counts every row as `sequence_len` tokens.
    """
    cluster = cluster_here(recipe, plan.parallel.world_size, nodes=nodes)
    if plan.facts is None or cluster is None:
        return None
    facts, constants = plan.facts, calibration()
    setting = setting_on(cluster, recipe, facts, plan.parallel, plan.batch)
    usual = setting
    if rows is not None:
        setting = replace(setting, sequence_len=rows.longest, document_len=rows.document)
        usual = replace(setting, sequence_len=round(rows.mean))
    seconds = None
    if cluster.rates != "guessed":
        seconds = predict_time(facts, usual, cluster, constants).total
    memory = evaluate(facts, setting, cluster, constants).memory
    return OwnRun(facts, setting, cluster, constants, memory, seconds)
