"""The whole of `plan`: meshes for the user's machines, the recipe's own among them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from ndtrain.errors import MeshError, NdtrainError, RecipeError
from ndtrain.plan.calibration import Calibration
from ndtrain.plan.checks import check_model
from ndtrain.plan.decide import combine, try_plan
from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.hardware import Cluster, build_cluster, calibration
from ndtrain.plan.machines import Machines, cluster_for, host_cluster
from ndtrain.plan.model_facts import find_facts
from ndtrain.plan.numbers import either
from ndtrain.plan.plan import ParallelPlan, rows_of_step
from ndtrain.plan.report import count_of, describe_model
from ndtrain.plan.search import (
    Candidate,
    evaluate,
    left_out,
    limit_gib,
    search,
    setting_on,
    why_first,
)
from ndtrain.plan.tables import (
    LEGEND,
    candidate_json,
    describe_cluster,
    describe_scores,
    memory_table,
    mesh_table,
    time_table,
    traffic_table,
)
from ndtrain.plan.too_large import Way, describe_shortage, ways_to_fit
from ndtrain.recipe.load import LoadedRecipe, check_rules
from ndtrain.recipe.schema import Recipe


@dataclass(frozen=True)
class Planned:
    """Every mesh for some machines.

    Attributes:
        candidates: best first; those that do not fit come last.
        own: the recipe's own mesh, micro-batch and policy; None where its product differs.
        rows: rows of a step, the same on every mesh.
        left_out: meshes that work for the model, and cannot hold so many rows a step.
        ways: where no mesh fits, changes with which one does.
        assumed: no GPU was named or found.
        on_host: the recipe on this machine's CPU, where it would run there.
    """

    recipe: Recipe
    facts: ModelFacts
    cluster: Cluster
    constants: Calibration
    candidates: tuple[Candidate, ...]
    own: Candidate | None
    assumed: bool
    rows: int
    left_out: tuple[ParallelPlan, ...]
    ways: tuple[Way, ...] = ()
    on_host: Candidate | None = None

    def pick(self, number: int) -> Candidate:
        """The candidate with a number of the list.

        Raises:
            RecipeError: there is no such number.
        """
        if not 1 <= number <= len(self.candidates):
            raise RecipeError(
                f"there is no mesh {number}: {len(self.candidates)} are possible.",
                where="--apply",
                hint=f"Use a number from 1 to {len(self.candidates)}.",
            )
        return self.candidates[number - 1]


def plan_recipe(loaded: LoadedRecipe, machines: Machines, *, assumed_gpu: str) -> Planned:
    """All meshes for the machines, ranked.

    Raises:
        NdtrainError: the recipe breaks a rule, or its model is not known.
        MeshError: no mesh of this many ranks works for the model.
    """
    recipe = loaded.recipe
    broken, _ = check_rules(loaded)
    problems: list[NdtrainError] = [*broken]
    if problems:
        raise combine(problems)
    key = "base_model" if recipe.model_config_ is None else "model_config"
    facts = find_facts(recipe, where=loaded.position(key))
    ranks = machines.world_size or len(machines.found) or _product(recipe)
    cluster = cluster_for(machines, recipe, ranks)
    assumed = cluster is None
    if cluster is None:
        cluster = build_cluster(
            assumed_gpu,
            world_size=ranks,
            nodes=machines.nodes,
            intra=machines.intra,
            inter=machines.inter,
        )
    constants = calibration()
    rows = rows_of_step(recipe, ranks)
    # Other sizes must not train on another batch: what differs is the mesh alone.
    batch = {"global_batch_size": rows, "gradient_accumulation_steps": None}
    held = recipe.model_copy(update=batch)
    found = search(held, facts, cluster, constants)
    without = tuple(left_out(held, facts, cluster.world_size))
    if not found:
        raise _none_works(loaded, facts, cluster.world_size, rows, without)
    own = _own(recipe, facts, cluster, constants)
    ranked = _own_first(found, own)
    ways = () if found[0].fits else tuple(ways_to_fit(held, facts, cluster, constants))
    on_host = None
    if assumed and (ranks == 1 or recipe.device == "cpu"):
        on_host = _own(recipe, facts, host_cluster(ranks), constants)
    return Planned(
        recipe, facts, cluster, constants, ranked, own, assumed, rows, without, ways, on_host
    )


def _own_first(found: Sequence[Candidate], own: Candidate | None) -> tuple[Candidate, ...]:
    """The list, with the recipe as it stands before whatever is not predicted to be faster."""
    if own is None or not own.fits:
        return tuple(found)
    others = [one for one in found if one.parallel.sizes != own.parallel.sizes]
    if any(one.fits and one.tokens_per_second > own.tokens_per_second for one in found):
        return tuple(found)
    return (own, *others)


def _none_works(
    loaded: LoadedRecipe,
    facts: ModelFacts,
    ranks: int,
    rows: int,
    without: Sequence[ParallelPlan],
) -> NdtrainError:
    """Why there is no mesh at all."""
    if not without:
        # What stands against every mesh stands against the plainest.
        plainest = ParallelPlan(dp_shard=ranks)
        if refused := check_model(facts, loaded.recipe, plainest, loaded.position):
            return combine(refused)
    return MeshError(
        f"no mesh of {count_of(ranks, 'rank')} works for {facts.name} with {rows} rows a step"
        f"{': ' + _why_left_out(rows, without) if without else ''}.",
        where=loaded.position("global_batch_size"),
        hint="Use a global_batch_size with more divisors, or another number of ranks.",
    )


def _why_left_out(rows: int, without: Sequence[ParallelPlan]) -> str:
    """`7 or 14 data ranks do not divide 32 rows`."""
    uneven = sorted({mesh.data_ranks for mesh in without if rows % mesh.data_ranks})
    even = sorted({mesh.data_ranks for mesh in without if rows % mesh.data_ranks == 0})
    reasons = []
    if uneven:
        reasons.append(f"{either(uneven)} data ranks do not divide {rows} rows")
    if even:
        reasons.append(
            f"{either(even)} data ranks need more than one pass, which optimizer_in_backward "
            "cannot have"
        )
    return " and ".join(reasons)


def plan_text(
    planned: Planned, shown: Sequence[Candidate], *, details: bool = False
) -> Iterator[RenderableType]:
    """What `plan` prints.

    Args:
        details: also memory, seconds and exchanged bytes by part.
    """
    facts, cluster, rows = planned.facts, planned.cluster, planned.rows
    fitting = sum(candidate.fits for candidate in planned.candidates)
    possible = len(planned.candidates)
    yield (
        f"{count_of(possible, 'mesh', 'meshes')} {'is' if possible == 1 else 'are'} possible, "
        f"{fitting} {'fits' if fitting == 1 else 'fit'}; all hold {count_of(rows, 'row')} a step."
    )
    if planned.left_out:
        reason = _why_left_out(rows, planned.left_out)
        yield f"{len(planned.left_out)} more left out: {reason}."
    yield describe_model(facts)
    yield describe_cluster(
        cluster,
        limit_gib(cluster, planned.constants),
        assumed=planned.assumed,
        on_cpu=planned.recipe.device == "cpu",
    )
    if planned.on_host is not None:
        yield _host_line(planned.on_host)
    best = shown[0]
    yield describe_scores(facts, planned.recipe.sequence_len, best)
    yield ""
    yield mesh_table(shown, planned.own)
    if details:
        yield memory_table(shown)
        yield time_table(shown)
        yield traffic_table(shown, cluster)
        yield LEGEND
    if not fitting:
        yield describe_shortage(planned.candidates[0])
        ways = [f"  {number}. {way}" for number, way in enumerate(planned.ways, 1)]
        if ways:
            yield "\n".join(["What would fit, the one that changes least first:", *ways])
        yield "docs/how-to/make-it-fit.md says what each change costs."
    elif possible > 1:
        yield why_first(planned.candidates[0], planned.candidates[1])
    if planned.own is not None:
        yield _own_line(planned, planned.own)
    if cluster.world_size > 8 or cluster.gpu.name != "h200":
        yield (
            "Rates are fitted to steps on up to 4 H200; for other machines this is arithmetic, "
            "not measurement."
        )


def plan_json(planned: Planned, shown: Sequence[Candidate]) -> dict[str, Any]:
    """What `plan --json` prints."""
    facts, cluster = planned.facts, planned.cluster
    own = planned.own
    return {
        "model": vars(facts),
        "cluster": {
            "gpu": vars(cluster.gpu),
            "gpus_per_node": cluster.gpus_per_node,
            "nodes": cluster.nodes,
            "intra": vars(cluster.intra),
            "inter": vars(cluster.inter),
            "gpu_is_assumed": planned.assumed or cluster.gpu_is_assumed,
            "rates": cluster.rates,
        },
        "rows_per_step": planned.rows,
        "possible": len(planned.candidates),
        "left_out": len(planned.left_out),
        "would_fit": [str(way) for way in planned.ways],
        "fitting": sum(candidate.fits for candidate in planned.candidates),
        "meshes": [candidate_json(facts, candidate, cluster) for candidate in shown],
        "recipe": None if own is None else candidate_json(facts, own, cluster),
    }


def _host_line(own: Candidate) -> str:
    ranks = own.parallel.world_size
    each = "" if ranks == 1 else f" in each of {ranks} processes"
    verdict = "" if own.fits else f", of which {own.limit_gib:.1f} are there"
    return f"On this machine's CPU it needs {own.memory.total / 2**30:.1f} GiB{each}{verdict}."


def _own_line(planned: Planned, own: Candidate) -> str:
    best = planned.candidates[0]
    verdict = f"{own.tokens_per_second:,.0f} tokens/s"
    if not own.fits:
        verdict = f"does not fit: {own.memory.total / 2**30:.0f} GiB of {own.limit_gib:.0f}"
    elif best.fits:
        verdict += f", {100 * own.tokens_per_second / best.tokens_per_second:.0f} % of the first"
    return f"The recipe as it stands ({own.parallel}): {verdict}."


def _product(recipe: Recipe) -> int:
    shard = recipe.dp_shard_size or 1
    others = recipe.dp_replicate_size * recipe.context_parallel_size * recipe.tensor_parallel_size
    return shard * others


def _own(
    recipe: Recipe, facts: ModelFacts, cluster: Cluster, constants: Calibration
) -> Candidate | None:
    """The recipe as it stands, where it works on this many ranks."""
    decided, problems = try_plan(
        recipe, facts, world_size=cluster.world_size, where=lambda key: key
    )
    if problems or decided is None:
        return None
    parallel: ParallelPlan = decided.parallel
    setting = setting_on(cluster, recipe, facts, parallel, decided.batch)
    return evaluate(facts, setting, cluster, constants)
