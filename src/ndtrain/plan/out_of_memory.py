"""What a run that ran out of memory is told: the planned split and what would have fitted."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from ndtrain.errors import OutOfMemoryError
from ndtrain.plan.calibration import Calibration
from ndtrain.plan.checks import choose_cp_method, ulysses_works
from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.hardware import GIB, Cluster
from ndtrain.plan.plan import ParallelPlan
from ndtrain.plan.search import Candidate, evaluate
from ndtrain.plan.setting import POLICIES, Policy, Setting, precision_of
from ndtrain.plan.small_states import check_small_states
from ndtrain.recipe.schema import Recipe
from ndtrain.recipe.words import LOW_BIT_OPTIMIZERS

_SHOWN = 3
_SMALL_CHUNK = 512
_BUDGET = 0.9
_SAFETY = 0.95
"""A change must leave this much more room than a plan would: the last prediction was wrong."""


@dataclass(frozen=True)
class Change:
    """A change of the recipe that makes a run fit.

    Attributes:
        keys: what to set.
        cost: seconds a token relative to now, minus 1.
    """

    keys: dict[str, str]
    candidate: Candidate
    cost: float

    def __str__(self) -> str:
        words = ", ".join(f"{key}: {value}" for key, value in self.keys.items())
        gib = self.candidate.memory.total / GIB
        speed = f"{100 * self.cost:.0f} % slower" if self.cost > 0.005 else "as fast"
        return f"{words} ({gib:.{0 if gib >= 10 else 1}f} GiB, {speed})"


def cheapest_changes(
    recipe: Recipe,
    facts: ModelFacts,
    setting: Setting,
    cluster: Cluster,
    constants: Calibration,
) -> list[Change]:
    """Changes that would fit, cheapest first; at most three.

    Where fewer than three single changes are enough, two or three together are tried; what is
    enough alone is not offered again with company, nor the same keys with smaller values.
    """
    now = evaluate(facts, setting, cluster, constants)
    # The run went over what was predicted: only what needs less than it did can help.
    limit = _SAFETY * min(now.limit_gib, now.memory.total / GIB) * GIB
    options = list(_options(recipe, facts, setting))
    enough: list[tuple[_Option, ...]] = []
    found: list[Change] = []
    for count in (1, 2, 3):
        for together in combinations(options, count):
            if len({option.kind for option in together}) < count:
                continue
            if any(set(earlier) <= set(together) for earlier in enough):
                continue
            changed = setting
            for option in together:
                changed = option.apply(changed)
            if changed.steps_early and changed.accumulation > setting.accumulation:
                continue
            candidate = evaluate(facts, changed, cluster, constants)
            if candidate.memory.total > limit:
                continue
            enough.append(together)
            cost = now.tokens_per_second / candidate.tokens_per_second - 1
            found.append(Change(_keys(recipe, setting, changed, together), candidate, cost))
        if len(found) >= _SHOWN:
            break
    best: dict[frozenset[str], Change] = {}
    for change in sorted(found, key=lambda change: (round(change.cost, 2), len(change.keys))):
        best.setdefault(frozenset(change.keys), change)
    return list(best.values())[:_SHOWN]


def explain_out_of_memory(
    recipe: Recipe,
    facts: ModelFacts,
    setting: Setting,
    cluster: Cluster,
    constants: Calibration,
    *,
    where: str = "",
    cause: str = "",
) -> OutOfMemoryError:
    """The error a run ends with: planned memory by part, and the cheapest changes that fit.

    Args:
        where: what ran out, e.g. `rank 3, step 12`.
        cause: what the allocator said.
    """
    planned = evaluate(facts, setting, cluster, constants).memory
    parts = ", ".join(f"{name} {gib:.1f}" for name, gib in planned.gib().items() if gib >= 0.05)
    what = "the device" if cluster.has_gpus else "the host"
    own = "" if cluster.has_gpus else " that are this rank's share"
    said = f" ({cause})" if cause else ""
    message = (
        f"{what} ran out of memory{said}. Planned were {planned.total / GIB:.1f} GiB of the "
        f"{cluster.gpu.memory_gib:.3g} GiB{own}: {parts}."
    )
    changes = cheapest_changes(recipe, facts, setting, cluster, constants)
    if not changes:
        hint = "No smaller setting of this mesh fits: use more GPUs, or an adapter (adapter: lora)."
    else:
        lines = "\n".join(f"  {number}. {change}" for number, change in enumerate(changes, 1))
        hint = f"What would fit, cheapest first:\n{lines}"
    return OutOfMemoryError(message, where=where, hint=hint)


@dataclass(frozen=True)
class _Option:
    """One thing to change; of one kind only one can be chosen.

    Attributes:
        keys: what to set in the recipe.
        apply: the setting with it.
    """

    kind: str
    keys: tuple[tuple[str, str], ...]
    apply: Callable[[Setting], Setting]


def _options(recipe: Recipe, facts: ModelFacts, setting: Setting) -> Iterator[_Option]:
    """Everything that takes less memory and trains the same rows a step."""
    yield from _smaller_batches(setting)
    yield from _policies(setting)
    yield from _other_meshes(recipe, facts, setting)
    if setting.loss_chunk > _SMALL_CHUNK:
        yield _Option(
            "loss",
            (("loss_chunk_tokens", str(_SMALL_CHUNK)),),
            lambda setting: replace(setting, loss_chunk=_SMALL_CHUNK),
        )
    if not setting.tiled:
        yield _Option(
            "tiled",
            (("tiled_mlp", "true"),),
            lambda setting: replace(setting, tiled=True),
        )
    if not setting.reshard and setting.fsdp > 1:
        yield _Option(
            "reshard",
            (("reshard_after_forward", "true"),),
            lambda setting: replace(setting, reshard=True),
        )
    small = recipe.model_copy(update={"optimizer_state_dtype": "8bit"})
    tp = setting.parallel.tp
    if (
        recipe.optimizer in LOW_BIT_OPTIMIZERS
        and recipe.optimizer_state_dtype == "fp32"
        and not check_small_states(small, facts, tp, lambda key: key)
    ):
        optimizer = precision_of(small, on_cuda=setting.on_gpu).optimizer
        yield _Option(
            "optimizer",
            (("optimizer_state_dtype", "8bit"),),
            lambda setting: replace(
                setting, precision=replace(setting.precision, optimizer=optimizer)
            ),
        )
    if setting.frozen_whole and setting.fsdp > 1:
        yield _Option(
            "frozen",
            (("shard_frozen", "true"),),
            lambda setting: replace(setting, frozen_whole=False),
        )


def _smaller_batches(setting: Setting) -> Iterator[_Option]:
    """Half the micro-batch and twice the accumulation: the global batch stays."""
    micro, times = setting.micro_batch, 1
    while micro % 2 == 0:
        micro, times = micro // 2, times * 2
        yield _Option("batch", (("micro_batch_size", str(micro)),), _divide_batch(times))


def _divide_batch(times: int) -> Callable[[Setting], Setting]:
    return lambda setting: replace(
        setting,
        micro_batch=setting.micro_batch // times,
        accumulation=setting.accumulation * times,
    )


def _policies(setting: Setting) -> Iterator[_Option]:
    """Activation policies that keep less than the present one, the last of them on the host."""
    for policy in POLICIES[POLICIES.index(setting.policy) + 1 :]:
        if policy != "budget":
            value = "true" if policy == "full" else policy
            yield _Option("policy", (("gradient_checkpointing", value),), _use_policy(policy))
        elif setting.compiled:
            keys = (("activation_memory_budget", str(_BUDGET)),)
            yield _Option("policy", keys, _use_policy(policy))
    if setting.on_gpu and not setting.offload:
        yield _Option(
            "policy",
            (("gradient_checkpointing", "true"), ("activation_offloading", "true")),
            lambda setting: replace(setting, policy="full", offload=True),
        )


def _use_policy(policy: Policy) -> Callable[[Setting], Setting]:
    return lambda setting: replace(setting, policy=policy)


def _other_meshes(recipe: Recipe, facts: ModelFacts, setting: Setting) -> Iterator[_Option]:
    """The same ranks: copies turned into shards, or each row split over two of them."""
    now = setting.parallel
    if now.dp_replicate > 1:
        shards = now.dp_shard * now.dp_replicate
        wider = replace(now, dp_replicate=1, dp_shard=shards)
        keys = (("dp_replicate_size", "1"), ("dp_shard_size", str(shards)))
        yield _Option("mesh", keys, lambda setting: replace(setting, parallel=wider))
    times = 2
    while now.dp_shard % times == 0 and not facts.mixing:
        cp = times * now.cp
        if recipe.context_parallel_method == "ulysses" and not ulysses_works(facts, now.tp, cp):
            return
        method = choose_cp_method(facts, now.tp, cp, recipe.context_parallel_method)
        split = replace(now, dp_shard=now.dp_shard // times, cp=cp, cp_method=method)
        keys = (("dp_shard_size", str(split.dp_shard)), ("context_parallel_size", str(cp)))
        yield _Option("mesh", keys, _split_rows(split, times))
        times *= 2


def _split_rows(mesh: ParallelPlan, times: int) -> Callable[[Setting], Setting]:
    """Fewer rows at a time, so more often."""
    return lambda setting: replace(
        setting, parallel=mesh, accumulation=times * setting.accumulation
    )


def _keys(
    recipe: Recipe, before: Setting, after: Setting, together: Sequence[_Option]
) -> dict[str, str]:
    """What to write, with the accumulation that keeps the global batch."""
    keys = {key: value for option in together for key, value in option.keys}
    if after.accumulation != before.accumulation and recipe.global_batch_size is None:
        keys["gradient_accumulation_steps"] = str(after.accumulation)
    return keys
