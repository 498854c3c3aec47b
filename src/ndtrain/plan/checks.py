"""Which meshes a model can be split over: every rule, its numbers and the sizes that work."""

from collections.abc import Callable
from dataclasses import replace

from ndtrain.errors import MeshError, NdtrainError, RecipeError
from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.families import FAMILIES
from ndtrain.plan.numbers import either
from ndtrain.plan.plan import BatchPlan, ParallelPlan
from ndtrain.plan.small_states import check_small_states
from ndtrain.recipe.schema import Recipe

Position = Callable[[str], str]
"""Where the recipe sets a key, as `file:line:col`."""

_LARGEST_TP = 64
FLOAT8_HIDDEN = 4096
"""Hidden size from which 8-bit matmuls pay; a model of 2048 was measured to lose 8 %."""


def local_heads(facts: ModelFacts, tp: int) -> tuple[int, int]:
    """Query and key/value heads one tensor-parallel rank attends with."""
    if facts.family.tp_attention != "heads":
        return facts.num_heads, facts.num_kv_heads
    return facts.num_heads // tp, max(1, facts.num_kv_heads // tp)


def tensor_size_works(facts: ModelFacts, tp: int) -> bool:
    """Whether heads and experts can be dealt over `tp` ranks."""
    return not _head_problem(facts, tp) and not _expert_problem(facts, tp)


def valid_tensor_sizes(facts: ModelFacts, limit: int = _LARGEST_TP) -> tuple[int, ...]:
    """All tensor-parallel sizes up to `limit` that work."""
    return tuple(tp for tp in range(1, limit + 1) if tensor_size_works(facts, tp))


def check_tensor_parallel(facts: ModelFacts, tp: int, *, where: str = "") -> list[NdtrainError]:
    """Heads and experts against `tensor_parallel_size`.

    Vocabulary and intermediate size need not divide: the last rank holds a smaller part.
    """
    hint = f"Use {either(valid_tensor_sizes(facts))}."
    problems = (_head_problem(facts, tp), _expert_problem(facts, tp))
    return [MeshError(text, where=where, hint=hint) for text in problems if text]


def head_problem(num_heads: int, num_kv_heads: int, tp: int, *, shares_kv: bool = True) -> str:
    """Why heads cannot be dealt over `tp` ranks, empty where they can.

    This is the one rule: planning asks it of a model's sizes, the engine of the model it splits.

    Args:
        shares_kv: keys and values are linears of their own. With more ranks than key/value heads
            each rank then keeps them whole and takes its own head.
    """
    start = f"tensor_parallel_size is {tp}, but the model has"
    if num_heads % tp:
        return f"{start} {num_heads} query heads ({num_heads} is not divisible by {tp})."
    if shares_kv and num_kv_heads % tp and tp % num_kv_heads:
        return (
            f"{start} {num_kv_heads} key/value heads ({num_kv_heads} is not divisible by {tp}, nor "
            f"{tp} by {num_kv_heads})."
        )
    return ""


def check_heads(num_heads: int, num_kv_heads: int, tp: int) -> None:
    """Refuse a tensor-parallel size that the heads of a model do not allow.

    Raises:
        MeshError: names the sizes that work.
    """
    problem = head_problem(num_heads, num_kv_heads, tp)
    if problem:
        sizes = range(1, min(num_heads, _LARGEST_TP) + 1)
        works = [size for size in sizes if not head_problem(num_heads, num_kv_heads, size)]
        raise MeshError(problem, where="tensor_parallel_size", hint=f"Use {either(works)}.")


def _head_problem(facts: ModelFacts, tp: int) -> str:
    split = facts.family.tp_attention
    if split == "none":
        return ""
    return head_problem(facts.num_heads, facts.num_kv_heads, tp, shares_kv=split == "heads")


def _expert_problem(facts: ModelFacts, tp: int) -> str:
    """Each rank runs a slice of every expert; gate and up are one tensor, split in equal parts."""
    size = facts.expert_intermediate_size
    if not facts.num_experts or not facts.family.tp_mlp or size % tp == 0:
        return ""
    return (
        f"tensor_parallel_size is {tp}, but the model's {facts.num_experts} experts are {size} "
        f"wide ({size} is not divisible by {tp})."
    )


def ulysses_works(facts: ModelFacts, tp: int, cp: int) -> bool:
    """Whether the heads of one tensor-parallel rank can be dealt over the ranks of a sequence."""
    queries, keys = local_heads(facts, tp)
    return queries % cp == 0 and keys % cp == 0


def choose_cp_method(
    facts: ModelFacts, tp: int, cp: int, wanted: str = "auto", *, where: str = ""
) -> str:
    """How the ranks of a sequence exchange: `none`, `ulysses` or `allgather`.

    Raises:
        MeshError: Ulysses is asked for and the heads do not divide.
    """
    if cp == 1:
        return "none"
    if wanted == "allgather":
        return "allgather"
    if ulysses_works(facts, tp, cp):
        return "ulysses"
    if wanted == "auto":
        return "allgather"
    queries, keys = local_heads(facts, tp)
    sizes = [size for size in range(1, max(cp, keys) + 1) if ulysses_works(facts, tp, size)]
    raise MeshError(
        f"context_parallel_method is 'ulysses' and context_parallel_size is {cp}, but a rank has "
        f"{queries} query and {keys} key/value heads to deal.",
        where=where,
        hint=f"Use context_parallel_size {either(sizes)}, or context_parallel_method: allgather.",
    )


def sequence_problem(facts: ModelFacts) -> str:
    """Why tp ranks cannot share the tokens between attention and MLP, empty where they can."""
    if facts.model_type not in FAMILIES:
        return f"'{facts.model_type}' is not among the architectures ndtrain is tested with"
    if facts.num_experts or facts.family.tp_attention == "none":
        return f"parts of {facts.model_type} are split by transformers, which needs all tokens"
    return ""


def why_whole_tokens(facts: ModelFacts, recipe: Recipe) -> str:
    """Why `tensor_sequence_parallel: auto` is off for a recipe, empty where it is on."""
    problem = sequence_problem(facts)
    in_fp32 = recipe.bf16 is False or (recipe.bf16 == "auto" and recipe.device == "cpu")
    if not problem and recipe.param_dtype == "bf16" and recipe.adapter is None and in_fp32:
        return (
            "computed in fp32 and kept in bf16 (param_dtype), the ranks' parts of a norm's "
            "gradient would be rounded before they are summed"
        )
    return problem


def choose_exchange(facts: ModelFacts, recipe: Recipe, parallel: ParallelPlan) -> ParallelPlan:
    """The same sizes with how their ranks share a row, as the recipe asks and the model allows.

    Raises:
        MeshError: Ulysses is asked for and the heads do not divide.
    """
    method = choose_cp_method(facts, parallel.tp, parallel.cp, recipe.context_parallel_method)
    wanted = recipe.tensor_sequence_parallel
    problem = why_whole_tokens(facts, recipe) if wanted == "auto" else sequence_problem(facts)
    shares = parallel.tp > 1 and wanted is not False and not problem
    chosen = replace(parallel, cp_method=method, sequence_parallel=shares)
    overlaps = recipe.async_tensor_parallel and not why_tokens_wait(facts, recipe, chosen)
    return replace(chosen, overlaps=overlaps)


def why_tokens_wait(facts: ModelFacts, recipe: Recipe, parallel: ParallelPlan) -> str:
    """Why products are not computed while tokens travel, empty where they can be.

    Uneven parts are left out because each rank compiles its own blocks: of other sizes, it might
    choose other products to compute again, and wait for ranks that do not.
    """
    if not parallel.sequence_parallel:
        return "every rank has all tokens"
    if recipe.fp8:
        return "fp8 scales what it multiplies as a whole"
    if facts.intermediate_size % parallel.tp:
        return (
            f"the {facts.intermediate_size} features of an MLP do not divide by "
            f"tensor_parallel_size {parallel.tp}"
        )
    return ""


def check_sequence(
    facts: ModelFacts, recipe: Recipe, parallel: ParallelPlan, where: Position
) -> list[NdtrainError]:
    """`tensor_sequence_parallel: true` against the model."""
    problem = sequence_problem(facts)
    if recipe.tensor_sequence_parallel is not True or parallel.tp == 1 or not problem:
        return []
    return [
        MeshError(
            f"tensor_sequence_parallel is true, but {problem}.",
            where=where("tensor_sequence_parallel"),
            hint="Use tensor_sequence_parallel: auto.",
        )
    ]


def check_mixing(facts: ModelFacts, cp: int, *, where: str = "") -> list[NdtrainError]:
    """`context_parallel_size` against layers in which tokens meet outside attention."""
    if cp == 1 or not facts.mixing:
        return []
    return [
        MeshError(
            f"context_parallel_size is {cp}, but '{facts.model_type}' has {facts.mixing}: there "
            "the parts of a row would not see each other.",
            where=where,
            hint="Use context_parallel_size: 1; dp_shard_size works.",
        )
    ]


def check_adapters(recipe: Recipe, parallel: ParallelPlan, where: Position) -> list[NdtrainError]:
    """Quantised bases are sharded by rows, but cannot be split over tensor-parallel ranks."""
    key = "load_in_8bit" if recipe.load_in_8bit else "load_in_4bit"
    if parallel.tp == 1 or not (recipe.load_in_8bit or recipe.load_in_4bit):
        return []
    return [
        MeshError(
            f"{key} stores a row's weights together as bytes, which tensor_parallel_size "
            f"{parallel.tp} cannot split.",
            where=where(key),
            hint="Set tensor_parallel_size: 1; dp_shard_size and context_parallel_size work.",
        )
    ]


def check_model(
    facts: ModelFacts, recipe: Recipe, parallel: ParallelPlan, where: Position
) -> list[NdtrainError]:
    """Everything that can be known of this model on this mesh before it is built."""
    place = where("tensor_parallel_size")
    problems = check_tensor_parallel(facts, parallel.tp, where=place)
    if not problems:
        try:
            choose_cp_method(
                facts,
                parallel.tp,
                parallel.cp,
                recipe.context_parallel_method,
                where=where("context_parallel_method"),
            )
        except MeshError as error:
            problems.append(error)
    problems += check_mixing(facts, parallel.cp, where=where("context_parallel_size"))
    problems += check_sequence(facts, recipe, parallel, where)
    problems += check_adapters(recipe, parallel, where)
    problems += check_small_states(recipe, facts, parallel.tp, where)
    return [*problems, *check_float8(recipe, facts, where)]


def check_float8(recipe: Recipe, facts: ModelFacts, where: Position) -> list[NdtrainError]:
    """8-bit matmuls cost casts, which narrow matrices do not pay back."""
    if not recipe.fp8 or facts.hidden_size >= FLOAT8_HIDDEN:
        return []
    return [
        RecipeError(
            f"fp8 makes a model of hidden size {facts.hidden_size} slower: below {FLOAT8_HIDDEN} "
            "the casts cost more than the products gain.",
            where=where("fp8"),
            hint="Remove fp8.",
        )
    ]


def check_early_step(recipe: Recipe, batch: BatchPlan, where: Position) -> list[NdtrainError]:
    """An optimizer in the backward pass needs its whole batch in one pass."""
    if not recipe.optimizer_in_backward or batch.accumulation == 1:
        return []
    rows = batch.micro_batch * batch.accumulation
    return [
        MeshError(
            f"optimizer_in_backward steps within one pass, but global_batch_size "
            f"{batch.global_batch} takes {batch.accumulation} passes of {batch.micro_batch} on "
            f"each of {batch.data_ranks} data ranks.",
            where=where("optimizer_in_backward"),
            hint=f"Set micro_batch_size: {rows}, or leave optimizer_in_backward out.",
        )
    ]


def describe_batch(batch: BatchPlan, sequence_len: int, *, packed: bool) -> str:
    """The batch arithmetic, spelled out."""
    rows = batch.global_batch
    kind = "packed row" if packed else "row"
    most = "" if packed else "up to "
    return (
        f"global batch = micro {batch.micro_batch} × accumulation {batch.accumulation} × "
        f"{batch.data_ranks} data rank{_s(batch.data_ranks)} = {rows} {kind}{_s(rows)} = "
        f"{most}{rows * sequence_len:,} tokens a step"
    )


def describe_padding(recipe: Recipe, parallel: ParallelPlan) -> str | None:
    """A line on the padding that the split of a sequence needs, None when it needs none."""
    multiple = parallel.row_multiple
    padded = -(-recipe.sequence_len // multiple) * multiple
    if padded == recipe.sequence_len:
        return None
    causes = [f"cp {parallel.cp} ({parallel.cp_method})"] * (parallel.cp > 1)
    causes += [f"tp {parallel.tp} (sequence parallel)"] * parallel.sequence_parallel
    return (
        f"sequence_len {recipe.sequence_len} is not a multiple of {multiple}, which "
        f"{' and '.join(causes)} need{'' if causes[1:] else 's'}: rows are padded to {padded}. The "
        "padding is masked, the loss is the same."
    )


def _s(count: int) -> str:
    return "" if count == 1 else "s"
