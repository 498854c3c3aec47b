"""What happens to memory and speed as one thing grows: model, sequence or link."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, log

from ndtrain.plan.calibration import Calibration
from ndtrain.plan.checks import choose_exchange, tensor_size_works
from ndtrain.plan.facts import ModelFacts, facts_from_config
from ndtrain.plan.hardware import GIB, Cluster
from ndtrain.plan.memory import predict_memory
from ndtrain.plan.plan import BatchPlan, ParallelPlan
from ndtrain.plan.search import best_of_mesh, limit_gib
from ndtrain.plan.setting import setting_of
from ndtrain.plan.shapes import count_parameters
from ndtrain.recipe.schema import Recipe

Point = tuple[float, float]
LENGTHS = tuple(2**power for power in range(11, 22))
LINK_GBS = (2, 4, 8, 16, 32, 64, 128, 256, 450, 900)
_WIDTHS = (
    (768, 12),
    (1024, 16),
    (1536, 20),
    (2048, 24),
    (2560, 28),
    (3072, 28),
    (4096, 32),
    (5120, 40),
    (6144, 56),
    (8192, 80),
    (12288, 96),
    (16384, 126),
    (20480, 160),
)


@dataclass(frozen=True)
class Study:
    """The machines and the recipe that a study is made for."""

    recipe: Recipe
    cluster: Cluster
    constants: Calibration

    @property
    def limit(self) -> float:
        """What a plan may fill of a GPU, in GiB."""
        return limit_gib(self.cluster, self.constants)

    @property
    def node(self) -> int:
        """GPUs of a node."""
        return self.cluster.gpus_per_node

    @property
    def world(self) -> int:
        """All GPUs."""
        return self.cluster.world_size


def models_by_size() -> tuple[ModelFacts, ...]:
    """Llama-like models from 0.2 to 800 billion parameters, for plots over model size."""
    return tuple(
        facts_from_config(
            {
                "model_type": "llama",
                "hidden_size": hidden,
                "intermediate_size": hidden * 7 // 2,
                "num_hidden_layers": layers,
                "num_attention_heads": hidden // 64 if hidden < 2048 else hidden // 128,
                "num_key_value_heads": 4 if hidden < 2048 else 8,
                "vocab_size": 128256,
                "tie_word_embeddings": hidden < 4096,
            },
            name=f"{hidden} × {layers}",
            source="recipe",
        )
        for hidden, layers in _WIDTHS
    )


def least_memory(study: Study, facts: ModelFacts, mesh: ParallelPlan, length: int) -> float:
    """GiB of one GPU with one row a micro-batch and everything recomputed."""
    mesh = choose_exchange(facts, study.recipe, mesh)
    recipe = study.recipe.model_copy(update={"sequence_len": length})
    setting = setting_of(recipe, facts, mesh, BatchPlan(1, 1, mesh.data_ranks), policy="full")
    return predict_memory(facts, setting, study.constants).total / GIB


def best_speed(study: Study, facts: ModelFacts, mesh: ParallelPlan, length: int) -> float | None:
    """Tokens per second of one GPU at the mesh's best; None where nothing fits.

    What tiled MLPs make fit besides is left out: meshes are compared by what they do themselves.
    """
    mesh = choose_exchange(facts, study.recipe, mesh)
    # The mesh at its best: a global batch that it cannot hold must not stand in its way.
    free = {"global_batch_size": None, "gradient_accumulation_steps": None}
    recipe = study.recipe.model_copy(update={"sequence_len": length, **free})
    found = best_of_mesh(recipe, facts, study.cluster, study.constants, mesh)
    alone = found.fits and not found.setting.tiled
    return found.tokens_per_second_per_gpu if alone else None


def memory_over_size(study: Study, mesh: ParallelPlan, length: int) -> tuple[Point, ...]:
    """GiB over parameters."""
    return tuple(
        (float(count_parameters(facts)), least_memory(study, facts, mesh, length))
        for facts in models_by_size()
        if tensor_size_works(facts, mesh.tp)
    )


def memory_over_length(
    study: Study, facts: ModelFacts, mesh: ParallelPlan, lengths: Iterable[int] = LENGTHS
) -> tuple[Point, ...]:
    """GiB over sequence length."""
    return tuple((float(length), least_memory(study, facts, mesh, length)) for length in lengths)


def speed_over_length(
    study: Study, facts: ModelFacts, mesh: ParallelPlan, lengths: Iterable[int] = LENGTHS
) -> tuple[Point, ...]:
    """Tokens per second of one GPU over sequence length, as far as it fits."""
    speeds = ((float(length), best_speed(study, facts, mesh, length)) for length in lengths)
    return tuple((length, speed) for length, speed in speeds if speed is not None)


def speed_over_link(
    study: Study, facts: ModelFacts, mesh: ParallelPlan, length: int
) -> tuple[Point, ...]:
    """Tokens per second of one GPU over the rate of the link inside a node."""
    points = []
    for gbs in LINK_GBS:
        link = replace(study.cluster.intra, name=f"{gbs} GB/s", gbs=float(gbs))
        there = replace(study, cluster=replace(study.cluster, intra=link))
        speed = best_speed(there, facts, mesh, length)
        if speed is not None:
            points.append((float(gbs), speed))
    return tuple(points)


def first_above(points: Sequence[Point], limit: float) -> float | None:
    """Where a rising line crosses a limit, interpolated between its points on log scales.

    None when it stays below; its first x when it starts above.
    """
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 <= limit < y1:
            share = log(limit / y0) / log(y1 / y0)
            return exp(log(x0) + share * log(x1 / x0))
    return points[0][0] if points and points[0][1] > limit else None


def first_meeting(first: Sequence[Point], second: Sequence[Point]) -> Point | None:
    """Where the second line overtakes the first; both have the same x where both exist."""
    other = dict(second)
    shared = [(x, y, other[x]) for x, y in first if x in other]
    for (x0, a0, b0), (x1, a1, b1) in pairwise(shared):
        before, after = log(b0 / a0), log(b1 / a1)
        if before < 0 <= after:
            share = -before / (after - before)
            x = exp(log(x0) + share * log(x1 / x0))
            return x, exp(log(a0) + share * log(a1 / a0))
    return None


def candidate_meshes(study: Study) -> dict[str, ParallelPlan]:
    """The meshes worth drawing for a number of GPUs, with the name of each."""
    node, world = study.node, study.world
    nodes = world // node
    meshes: dict[str, ParallelPlan] = {}
    if world == 1:
        return {"1 GPU": ParallelPlan()}
    meshes[f"replicate {world}"] = ParallelPlan(dp_replicate=world)
    if nodes > 1:
        meshes[f"replicate {nodes} × shard {node}"] = ParallelPlan(nodes, node)
    meshes[f"shard {world}"] = ParallelPlan(1, world)
    tp = min(node, 8)
    meshes[f"shard {world // tp} × tp {tp}" if world > tp else f"tp {tp}"] = ParallelPlan(
        1, world // tp, 1, tp
    )
    meshes[f"shard {world // tp} × cp {tp}" if world > tp else f"cp {tp}"] = ParallelPlan(
        1, world // tp, tp, 1
    )
    return meshes


def working(meshes: dict[str, ParallelPlan], facts: ModelFacts) -> dict[str, ParallelPlan]:
    """Those that the model's heads allow."""
    return {name: mesh for name, mesh in meshes.items() if tensor_size_works(facts, mesh.tp)}
