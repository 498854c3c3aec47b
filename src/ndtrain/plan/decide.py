"""From a recipe and a model's sizes to the plan of a run, or to every reason why there is none."""

from ndtrain.errors import ExitCode, MeshError, NdtrainError, Problems
from ndtrain.plan.checks import (
    Position,
    check_early_step,
    check_model,
    choose_exchange,
    describe_padding,
    tensor_size_works,
    why_tokens_wait,
    why_whole_tokens,
)
from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.families import FAMILIES
from ndtrain.plan.plan import BatchPlan, ParallelPlan, Plan, plan_batch, plan_mesh
from ndtrain.plan.support import support_of
from ndtrain.recipe.schema import Recipe


def decide(
    recipe: Recipe,
    facts: ModelFacts | None,
    *,
    world_size: int | None = None,
    where: Position = lambda key: "",
) -> Plan:
    """The plan of a run.

    Args:
        facts: sizes of the model; None leaves the rules about them out.
        world_size: ranks that will be started; None = exactly what the recipe asks for.
        where: place of a recipe key, for messages.

    Raises:
        MeshError: the mesh does not work, for one reason.
        Problems: it does not work for several.
    """
    plan, problems = try_plan(recipe, facts, world_size=world_size, where=where)
    if problems or plan is None:
        raise combine(problems)
    return plan


def try_plan(
    recipe: Recipe,
    facts: ModelFacts | None,
    *,
    world_size: int | None,
    where: Position,
) -> tuple[Plan | None, list[NdtrainError]]:
    """The plan as far as it goes, and everything that is wrong with it."""
    problems: list[NdtrainError] = []
    parallel = _sizes(recipe, facts, world_size, where, problems)
    if facts is not None:
        # The model's rules hold for the recipe's own sizes, whatever was started.
        problems += check_model(facts, recipe, parallel or plan_mesh(recipe, None), where)
    if parallel is None:
        return None, problems
    batch = _batch(recipe, parallel, where, problems)
    if batch is None:
        return None, problems
    problems += check_early_step(recipe, batch, where)
    notices: list[str] = []
    if facts is not None and not problems:
        parallel = choose_exchange(facts, recipe, parallel)
        notices += _notices(recipe, facts, parallel)
        problems += _unsupported(facts, parallel.cp_method, where)
    return Plan(parallel, batch, facts, tuple(notices)), problems


def combine(problems: list[NdtrainError]) -> NdtrainError:
    """Several problems as one error; its exit code is that of the first."""
    if len(problems) == 1:
        return problems[0]
    error = Problems(problems)
    error.exit_code = problems[0].exit_code if problems else ExitCode.FAULT
    return error


def _sizes(
    recipe: Recipe,
    facts: ModelFacts | None,
    world_size: int | None,
    where: Position,
    problems: list[NdtrainError],
) -> ParallelPlan | None:
    def tp_works(size: int) -> bool:
        return facts is None or tensor_size_works(facts, size)

    key = "dp_shard_size" if recipe.dp_shard_size is not None else "tensor_parallel_size"
    try:
        return plan_mesh(recipe, world_size, where=where(key), tp_works=tp_works)
    except MeshError as error:
        problems.append(error)
        return None


def _batch(
    recipe: Recipe, parallel: ParallelPlan, where: Position, problems: list[NdtrainError]
) -> BatchPlan | None:
    try:
        return plan_batch(recipe, parallel.data_ranks)
    except MeshError as error:
        problems.append(MeshError(error.message, where=where("global_batch_size"), hint=error.hint))
        return None


def _notices(recipe: Recipe, facts: ModelFacts, parallel: ParallelPlan) -> list[str]:
    notices = []
    padding = describe_padding(recipe, parallel)
    if padding:
        notices.append(padding)
    why = why_whole_tokens(facts, recipe)
    if parallel.world_size > 1 and facts.model_type not in FAMILIES:
        notices.append(_untested(facts, parallel))
    elif parallel.tp > 1 and recipe.tensor_sequence_parallel == "auto" and why:
        notices.append(f"tensor_sequence_parallel is off: {why}.")
    if recipe.async_tensor_parallel and parallel.tp > 1 and not parallel.overlaps:
        waits = why_tokens_wait(facts, recipe, parallel)
        notices.append(f"async_tensor_parallel is off: {waits}.")
    if parallel.tp > 1 and facts.family.tp_attention == "none":
        notices.append(
            f"{facts.model_type} repeats its attention on every rank of tensor_parallel_size "
            f"{parallel.tp}: its tensor-parallel plan does not split it."
        )
    for kind, support in support_of(facts, parallel.cp_method).items():
        if support.works and support.note:
            notices.append(f"{facts.model_type} attends with {kind}: {support.note}.")
    if facts.max_positions is not None and recipe.sequence_len > facts.max_positions:
        notices.append(
            f"sequence_len {recipe.sequence_len} is longer than the {facts.max_positions} "
            f"positions {facts.name} was made for."
        )
    return notices


def _untested(facts: ModelFacts, parallel: ParallelPlan) -> str:
    """A line on an architecture that no test compares with one process."""
    text = f"'{facts.model_type}' is not among the architectures ndtrain is tested with"
    if parallel.tp > 1:
        text += (
            f": tensor_parallel_size {parallel.tp} works if transformers has a tensor-parallel "
            "plan for it"
        )
    return f"{text}. `ndtrain parity` compares its mesh with one process."


def _unsupported(facts: ModelFacts, method: str, where: Position) -> list[NdtrainError]:
    return [
        MeshError(
            f"{facts.model_type} attends with {kind}, which context_parallel_method "
            f"'{method}' cannot honour.",
            where=where("context_parallel_size"),
            hint="Set context_parallel_size: 1.",
        )
        for kind, support in support_of(facts, method).items()
        if not support.works
    ]
