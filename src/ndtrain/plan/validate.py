"""Everything that can be known of a run from its recipe and the model's sizes, in one report."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ndtrain.errors import MeshError, NdtrainError
from ndtrain.plan.advice import advise_memory, advise_placement, advise_sizes
from ndtrain.plan.decide import try_plan
from ndtrain.plan.disk import advise_disk
from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.hardware import GIB, Cluster, calibration
from ndtrain.plan.machines import Machines, cluster_for
from ndtrain.plan.memory import predict_memory
from ndtrain.plan.model_facts import find_facts
from ndtrain.plan.plan import BatchPlan, Plan
from ndtrain.plan.search import Candidate, evaluate, setting_on
from ndtrain.recipe.load import LoadedRecipe, check_rules
from ndtrain.recipe.schema import Recipe


@dataclass(frozen=True)
class Validation:
    """What `validate` found.

    Attributes:
        problems: reasons why the run would not start, in the order to show them.
        warnings: things that work and waste, or that may surprise.
        notices: what was accepted without effect, renamed or chosen.
        data: what reading the rows gave, with `--data`.
        predicted: memory and speed on the GPUs named or found; None without any.
    """

    facts: ModelFacts | None
    plan: Plan | None
    cluster: Cluster | None
    problems: tuple[NdtrainError, ...] = ()
    warnings: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    data: Mapping[str, object] = field(default_factory=dict)
    predicted: Candidate | None = None


def validate_recipe(loaded: LoadedRecipe, machines: Machines) -> Validation:
    """Check everything that needs neither weights nor GPU."""
    recipe, where = loaded.recipe, loaded.position
    broken, let_pass = check_rules(loaded)
    problems: list[NdtrainError] = [*broken]
    facts = _facts(loaded, problems)
    world_size = ranks_to_start(recipe, machines)
    plan, mesh_problems = try_plan(recipe, facts, world_size=world_size, where=where)
    problems += mesh_problems
    warnings: list[str] = []
    cluster = predicted = None
    if plan is not None:
        try:
            cluster = cluster_for(machines, recipe, plan.parallel.world_size)
        except NdtrainError as error:  # an unknown part, or nodes that do not divide the ranks
            problems.append(error)
        if facts is not None:
            warnings += advise_sizes(facts, plan.parallel)
        if cluster is not None:
            warnings += advise_placement(plan.parallel, cluster)
            if facts is not None and not problems:
                predicted, advice = _predict(recipe, facts, plan, cluster)
                warnings += advice
        warnings += _idle(machines, plan.parallel.world_size)
    warnings += _run_directory(recipe, loaded.path)
    if facts is not None:
        warnings += advise_disk(recipe, facts, run_directory(recipe, loaded.path))
    notices = (*loaded.notices, *let_pass, *(plan.notices if plan else ()))
    return Validation(
        facts=facts,
        plan=plan,
        cluster=cluster,
        problems=tuple(problems),
        warnings=tuple(warnings),
        notices=notices,
        predicted=predicted,
    )


def ranks_to_start(recipe: Recipe, machines: Machines) -> int | None:
    """How many ranks a start would have; None = exactly the product of the recipe's sizes.

    A recipe that leaves dp_shard_size open takes all GPUs of the machine.
    """
    if machines.world_size is not None:
        return machines.world_size
    if recipe.dp_shard_size is not None or recipe.device == "cpu" or not machines.found:
        return None
    others = recipe.dp_replicate_size * recipe.context_parallel_size * recipe.tensor_parallel_size
    return others * max(1, len(machines.found) // others)


def run_directory(recipe: Recipe, path: Path) -> Path:
    """Where the run would live."""
    return Path(recipe.output_dir) if recipe.output_dir else Path("runs") / path.stem


def _facts(loaded: LoadedRecipe, problems: list[NdtrainError]) -> ModelFacts | None:
    if loaded.recipe.base_model is None and loaded.recipe.model_config_ is None:
        return None
    key = "base_model" if loaded.recipe.model_config_ is None else "model_config"
    try:
        return find_facts(loaded.recipe, where=loaded.position(key))
    except MeshError as error:
        problems.append(error)
        return None


def _predict(
    recipe: Recipe, facts: ModelFacts, plan: Plan, cluster: Cluster
) -> tuple[Candidate, list[str]]:
    """Memory and speed of the recipe as it stands, and what they say of its mesh."""
    constants = calibration()
    parallel = plan.parallel
    predicted = evaluate(
        facts,
        setting_on(cluster, recipe, facts, parallel, plan.batch),
        cluster,
        constants,
    )
    alone = None
    if parallel.cp > 1:
        whole = replace(parallel, dp_shard=parallel.dp_shard * parallel.cp, cp=1, cp_method="none")
        batch = BatchPlan(1, 1, whole.data_ranks)
        setting = setting_on(cluster, recipe, facts, whole, batch)
        alone = predict_memory(facts, setting, constants).total / GIB
    advice = advise_memory(
        parallel,
        needed_gib=predicted.memory.total / GIB,
        limit_gib=predicted.limit_gib,
        alone_gib=alone,
    )
    return predicted, advice


def _idle(machines: Machines, world_size: int) -> list[str]:
    here = len(machines.found)
    if machines.world_size is not None or machines.gpu is not None or here <= world_size:
        return []
    return [f"{here - world_size} of this machine's {here} GPUs would stay idle."]


def _run_directory(recipe: Recipe, path: Path) -> list[str]:
    folder = run_directory(recipe, path)
    if not (folder / "status.json").is_file():
        return []
    if recipe.auto_resume_from_checkpoints:
        return [f"'{folder}' already holds a run: a start would continue it."]
    return [f"'{folder}' already holds a run: choose another output_dir, or start with --restart."]
