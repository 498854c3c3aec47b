"""All meshes for a number of GPUs, each at its best, ranked by predicted tokens per second."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log

from ndtrain.plan.calibration import Calibration
from ndtrain.plan.checks import check_model, choose_exchange, tensor_size_works
from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.hardware import GIB, Cluster
from ndtrain.plan.memory import MemorySplit, predict_memory
from ndtrain.plan.numbers import divisors
from ndtrain.plan.plan import BatchPlan, ParallelPlan
from ndtrain.plan.setting import POLICIES, Policy, Setting, setting_of
from ndtrain.plan.step_time import TimeSplit, Traffic, predict_time, predict_traffic
from ndtrain.plan.support import support_of
from ndtrain.recipe.schema import Recipe

_LARGEST_MICRO_BATCH = 64
_USUAL_BUDGET = 0.9
_EQUAL = 0.003
"""Predictions closer than this share count as equal; fewer exchanges then win."""


@dataclass(frozen=True)
class Candidate:
    """One mesh with a micro-batch and an activation policy, and what is predicted of it."""

    setting: Setting
    memory: MemorySplit
    time: TimeSplit
    traffic: Traffic
    limit_gib: float

    @property
    def parallel(self) -> ParallelPlan:
        """Its mesh."""
        return self.setting.parallel

    @property
    def fits(self) -> bool:
        """Whether it stays within what a plan may fill of a GPU."""
        return self.memory.total / GIB <= self.limit_gib

    @property
    def tokens_per_second(self) -> float:
        """Over all GPUs."""
        return self.setting.step_tokens / self.time.total

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Of one GPU."""
        return self.tokens_per_second / self.parallel.world_size


def limit_gib(cluster: Cluster, constants: Calibration) -> float:
    """What a plan may fill of a GPU, in GiB."""
    return cluster.gpu.memory_gib * constants.usable


def all_meshes(world_size: int) -> Iterator[ParallelPlan]:
    """Every way to write the world size as a product of the four sizes."""
    for replicate in divisors(world_size):
        for shard in divisors(world_size // replicate):
            rest = world_size // replicate // shard
            for cp in divisors(rest):
                yield ParallelPlan(replicate, shard, cp, rest // cp)


def possible_meshes(recipe: Recipe, facts: ModelFacts, world_size: int) -> Iterator[ParallelPlan]:
    """Those that a start would not refuse, with how they exchange: one list of rules for both."""
    for mesh in _meshes_of_model(recipe, facts, world_size):
        if _batches(recipe, mesh):
            yield mesh


def left_out(recipe: Recipe, facts: ModelFacts, world_size: int) -> list[ParallelPlan]:
    """Meshes that work for the model, and cannot hold the recipe's rows a step."""
    found = _meshes_of_model(recipe, facts, world_size)
    return [mesh for mesh in found if not _batches(recipe, mesh)]


def _meshes_of_model(recipe: Recipe, facts: ModelFacts, world_size: int) -> Iterator[ParallelPlan]:
    """Meshes that work for the model and its kind of training, whatever the batch."""
    for mesh in all_meshes(world_size):
        if not tensor_size_works(facts, mesh.tp) or mesh.cp > recipe.sequence_len // 2:
            continue
        if check_model(facts, recipe, mesh, lambda key: key):
            continue
        mesh = choose_exchange(facts, recipe, mesh)
        if all(support.works for support in support_of(facts, mesh.cp_method).values()):
            yield mesh


def search(
    recipe: Recipe, facts: ModelFacts, cluster: Cluster, constants: Calibration
) -> list[Candidate]:
    """The best candidate of every possible mesh, best first; those that do not fit come last."""
    sizes = {mesh.tp: mesh for mesh in all_meshes(cluster.world_size)}
    models = {tp: _setting(recipe, facts, cluster, ParallelPlan(tp=tp)) for tp in sizes}
    found = [
        _best(recipe, facts, cluster, constants, replace(models[mesh.tp], parallel=mesh))
        for mesh in possible_meshes(recipe, facts, cluster.world_size)
    ]
    return sorted(found, key=_rank)


def best_of_mesh(
    recipe: Recipe,
    facts: ModelFacts,
    cluster: Cluster,
    constants: Calibration,
    mesh: ParallelPlan,
) -> Candidate:
    """One mesh at its best; a candidate that does not fit where nothing does."""
    model = _setting(recipe, facts, cluster, mesh)
    return _best(recipe, facts, cluster, constants, model)


def evaluate(
    facts: ModelFacts, setting: Setting, cluster: Cluster, constants: Calibration
) -> Candidate:
    """What is predicted of one setting."""
    return Candidate(
        setting=setting,
        memory=predict_memory(facts, setting, constants),
        time=predict_time(facts, setting, cluster, constants),
        traffic=predict_traffic(facts, setting),
        limit_gib=limit_gib(cluster, constants),
    )


def setting_on(
    cluster: Cluster, recipe: Recipe, facts: ModelFacts, mesh: ParallelPlan, batch: BatchPlan
) -> Setting:
    """The setting a recipe asks for on a mesh of these devices."""
    return setting_of(
        recipe,
        facts,
        mesh,
        batch,
        on_cuda=cluster.has_gpus,
        device_gib=cluster.gpu.memory_gib,
    )


def why_first(first: Candidate, second: Candidate) -> str:
    """One sentence on what makes the first candidate better than the second."""
    if not second.fits:
        return "Only the first fits." if first.fits else "None fits."
    lead = first.tokens_per_second / second.tokens_per_second - 1
    parts = {
        name: getattr(second.time, name) / second.setting.step_tokens
        - getattr(first.time, name) / first.setting.step_tokens
        for name in vars(first.time)
    }
    name, gain = max(parts.items(), key=lambda item: item[1])
    if lead < _EQUAL or gain <= 0:
        return "The first two are equally fast; the first exchanges less."
    return (
        f"The first beats the second by {100 * lead:.1f} %: per million tokens it spends "
        f"{1e6 * gain:.2f} s less on {_PART_WORDS.get(name, name)}."
    )


_PART_WORDS = {
    "fsdp": "gathering weights and reducing gradients (dp_shard)",
    "replicate": "the all-reduce between copies (dp_replicate)",
    "tp": "the exchanges of tensor parallelism",
    "cp": "the exchanges of context parallelism",
    "matmul": "matrix work, of which it repeats less or which it splits less finely",
    "elementwise": "reading and writing intermediate values",
    "optimizer": "the optimizer, whose states are spread over more ranks",
}


def _setting(recipe: Recipe, facts: ModelFacts, cluster: Cluster, mesh: ParallelPlan) -> Setting:
    """The recipe on a mesh of these GPUs, before micro-batch and policy are chosen."""
    return setting_on(cluster, recipe, facts, mesh, BatchPlan(1, 1, 1))


def _best(
    recipe: Recipe,
    facts: ModelFacts,
    cluster: Cluster,
    constants: Calibration,
    mesh: Setting,
) -> Candidate:
    """The fastest policy and micro-batch that fit a mesh; the smallest where none does.

    Tiled MLPs are tried where nothing fits without.
    """
    fitting, least = _fitting(recipe, facts, cluster, constants, mesh)
    settings = fitting or [least]
    if not fitting and not mesh.tiled:
        fitting, other = _fitting(recipe, facts, cluster, constants, replace(mesh, tiled=True))
        settings = fitting or [least, other]
    candidates = [evaluate(facts, setting, cluster, constants) for setting in settings]
    return min(candidates, key=_rank)


def _fitting(
    recipe: Recipe,
    facts: ModelFacts,
    cluster: Cluster,
    constants: Calibration,
    mesh: Setting,
) -> tuple[list[Setting], Setting]:
    """Policies and micro-batches that fit a mesh, and the one that needs least."""
    limit = limit_gib(cluster, constants) * GIB
    fitting: list[Setting] = []
    smallest: tuple[float, Setting] | None = None
    for policy, offload in _policies(recipe, compiled=mesh.compiled):
        for micro, accumulation in _batches(recipe, mesh.parallel):
            setting = replace(
                mesh,
                policy=policy,
                offload=offload,
                micro_batch=micro,
                accumulation=accumulation,
            )
            if policy == "budget" and setting.budget >= 1:
                setting = replace(setting, budget=_USUAL_BUDGET)
            needed = predict_memory(facts, setting, constants).total
            if smallest is None or needed < smallest[0]:
                smallest = (needed, setting)
            if needed > limit:
                break
            fitting.append(setting)
    assert smallest is not None  # there is always a policy and a batch
    return fitting, smallest[1]


def _policies(recipe: Recipe, *, compiled: bool) -> list[tuple[Policy, bool]]:
    """Policies to try, each with whether what it keeps is offloaded."""
    policies = [policy for policy in POLICIES if compiled or policy != "budget"]
    kept: list[tuple[Policy, bool]] = [(policy, False) for policy in policies]
    # What is offloaded are the inputs of blocks that are recomputed whole.
    return [*kept, ("full", True)] if recipe.activation_offloading else kept


def _batches(recipe: Recipe, mesh: ParallelPlan) -> list[tuple[int, int]]:
    """Micro-batches to try, small to large, each with its accumulation.

    Those that hold the recipe's global batch; without one, powers of two and the recipe's own.
    """
    own = recipe.micro_batch_size
    if recipe.global_batch_size is not None:
        rows, rest = divmod(recipe.global_batch_size, mesh.data_ranks)
        sizes = [] if rest else divisors(rows)
        found = [(m, rows // m) for m in sizes if m <= _LARGEST_MICRO_BATCH or m == own]
    else:
        accumulation = recipe.gradient_accumulation_steps or 1
        powers = {1 << power for power in range(_LARGEST_MICRO_BATCH.bit_length())}
        found = [(micro, accumulation) for micro in sorted(powers | {own})]
    # An optimizer in the backward pass steps in one pass.
    return [pair for pair in found if pair[1] == 1 or not recipe.optimizer_in_backward]


def _rank(candidate: Candidate) -> tuple[bool, float, int, int, int, float]:
    """Sorting key: what fits, then speed, then fewer exchanges, then less memory."""
    speed = candidate.tokens_per_second
    if not candidate.fits:
        return (True, candidate.memory.total, 0, 0, 0, 0.0)
    parallel = candidate.parallel
    step = -round(log(speed) / _EQUAL)
    return (False, step, parallel.tp, parallel.cp, parallel.dp_shard, candidate.memory.total)
