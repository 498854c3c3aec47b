"""What is said when no mesh fits: how much is missing, and the least that would change it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ndtrain.plan.calibration import Calibration
from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.hardware import GIB, Cluster
from ndtrain.plan.search import Candidate, search
from ndtrain.recipe.rules import broken_rules
from ndtrain.recipe.schema import Recipe

_NODE = 8
_MOST_TIMES = 64
"""More GPUs than this many times those given are no advice."""
_OFFLOADED = {"gradient_checkpointing": True, "activation_offloading": True}
_SMALLER_STATES: tuple[Mapping[str, Any], ...] = (
    _OFFLOADED,
    {"optimizer_state_dtype": "bf16"},
    {"optimizer_state_dtype": "8bit"},
    {"param_dtype": "bf16", "optimizer_state_dtype": "bf16"},
    {"param_dtype": "bf16", "optimizer_state_dtype": "8bit"},
    {"param_dtype": "bf16", "optimizer_state_dtype": "8bit", **_OFFLOADED},
)
_LORA = {"adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_target_linear": True}
_ADAPTERS: tuple[Mapping[str, Any], ...] = (
    _LORA,
    {**_LORA, "adapter": "qlora", "load_in_4bit": True},
)


@dataclass(frozen=True)
class Way:
    """A change with which a mesh fits.

    Attributes:
        words: what to change.
        candidate: the best mesh with it.
    """

    words: str
    candidate: Candidate

    def __str__(self) -> str:
        mesh = self.candidate.parallel
        sizes = zip(("dp_replicate", "dp_shard", "cp", "tp"), mesh.sizes, strict=True)
        split = " × ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one rank"
        if self.candidate.setting.tiled:
            split += ", tiled_mlp: true"
        return (
            f"{self.words} ({split}: {self.candidate.memory.total / GIB:.1f} GiB, "
            f"{self.candidate.tokens_per_second:,.0f} tokens/s)"
        )


def ways_to_fit(
    recipe: Recipe, facts: ModelFacts, cluster: Cluster, constants: Calibration
) -> list[Way]:
    """The least change of each kind that fits, the one that changes the training least first.

    Smaller states on the same GPUs; more GPUs of the kind; an adapter. Each holds the rows of
    a step, and none breaks a rule between keys.

    Args:
        recipe: with the global batch that every mesh holds.
    """
    found = [
        next(_first_fitting(recipe, facts, cluster, constants, _SMALLER_STATES), None),
        _more_gpus(recipe, facts, cluster, constants),
    ]
    if recipe.adapter is None:
        found.append(next(_first_fitting(recipe, facts, cluster, constants, _ADAPTERS), None))
    return [way for way in found if way is not None]


def describe_shortage(least: Candidate) -> str:
    """How much the mesh that needs least lacks."""
    needed = least.memory.total / GIB
    what = "GPU" if least.setting.on_gpu else "process"
    return (
        f"None fits: mesh 1 needs least, {needed:.1f} GiB of each {what}, and that is "
        f"{needed - least.limit_gib:.1f} more than the {least.limit_gib:.1f} usable."
    )


def _first_fitting(
    recipe: Recipe,
    facts: ModelFacts,
    cluster: Cluster,
    constants: Calibration,
    changes: tuple[Mapping[str, Any], ...],
) -> Iterator[Way]:
    """Changes of the recipe that fit on the same machines, in their order."""
    for keys in changes:
        changed = recipe.model_copy(update=dict(keys))
        if changed == recipe or any(not problem.is_notice for problem in broken_rules(changed)):
            continue
        best = next(iter(search(changed, facts, cluster, constants)), None)
        if best is not None and best.fits:
            named = {key: value for key, value in keys.items() if not key.startswith("lora_")}
            words = ", ".join(f"{key}: {_yaml(value)}" for key, value in named.items())
            yield Way(words, best)


def _more_gpus(
    recipe: Recipe, facts: ModelFacts, cluster: Cluster, constants: Calibration
) -> Way | None:
    """The first doubling of the GPUs, up to whole nodes and then in nodes, that fits."""
    if not cluster.has_gpus:
        return None
    times = 2
    while times <= _MOST_TIMES:
        wider = cluster.gpus_per_node * 2
        if cluster.nodes == 1 and wider <= _NODE:
            cluster = replace(cluster, gpus_per_node=wider)
        else:
            cluster = replace(cluster, nodes=2 * cluster.nodes)
        best = next(iter(search(recipe, facts, cluster, constants)), None)
        if best is not None and best.fits:
            return Way(f"{cluster.world_size} GPUs of this kind", best)
        times *= 2
    return None


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
