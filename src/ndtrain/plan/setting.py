"""One way to run a recipe: mesh, micro-batch, activation policy and precision."""

import re
from dataclasses import dataclass
from typing import Literal

from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.plan import BatchPlan, ParallelPlan
from ndtrain.plan.shapes import count_parameters, lora_parameters, model_parameters
from ndtrain.recipe.schema import Recipe

Policy = Literal["none", "budget", "alternate", "attention", "full"]
"""What is recomputed in the backward pass: nothing; cheap pointwise work, as the compiler
chooses; every second matrix product; everything but attention; everything. `alternate` is other
engines' (torchtitan's selective recomputation), for comparing predictions with their runs."""

LossKernel = Literal["in_place", "compiled", "cross_entropy", "fp32_cross_entropy", "written_out"]
"""How the loss of a chunk of logits is computed: the gradient written over the logits, compiled to
two passes, with torch's own function on the logits as they are or in fp32, or step by step in
fp32."""

POLICIES: tuple[Policy, ...] = ("none", "budget", "attention", "full")
_MOMENTS = {"adam": 2, "nadam": 2, "radam": 2, "sgd": 1, "adagrad": 1, "rmsprop": 1, "muon": 1}
FROZEN_SHARE = 0.4
"""The engine keeps a frozen base whole while it fills no more than this of a device."""
GRADIENT_SHARE = 0.05
"""Gradients are summed once a step while whole ones fill no more than this of a device."""
_USUAL_DEVICE_GIB = 79.2
_FP32_BYTES = 4
ATTENTION_BUDGET = 0.2
"""The compiler's budget at which a compiled block still keeps attention, and little else."""
_MOMENT_BYTES = {"fp32": 4, "bf16": 2, "8bit": 1 + 4 / 256}
"""An 8-bit moment has a scale in fp32 for a block of up to 256."""


@dataclass(frozen=True)
class Precision:
    """Bytes a parameter takes on a rank that holds it, before sharding.

    Attributes:
        frozen: bytes of a parameter that is not trained.
        weight: bytes of a trained parameter.
        compute: bytes of an activation or a gathered weight.
        reduce: bytes of a gradient that is sent to be summed over ranks.
    """

    weight: float = 4
    gradient: float = 4
    optimizer: float = 8
    frozen: float = 2
    compute: int = 2
    reduce: float = 4


@dataclass(frozen=True)
class Setting:
    """What memory and time are predicted for.

    Attributes:
        trained: parameters of the model itself that are trained, whole.
        adapters: parameters of adapters, whole.
        budget: share of activations the compiler may keep, for the policy `budget`.
        reshard: gathered weights are freed between forward and backward.
        syncs_each: gradients of shards are summed at each micro-batch, not once a step.
        steps_early: gradients are used up block by block during the backward pass.
        frozen_whole: every rank holds the frozen base of an adapter whole, and gathers nothing.
        recompute_inside: what a compiled block recomputes is part of its graph, as ours is;
            otherwise the block is called a second time as a whole.
        sums_head: the head's gradient is summed over chunks of the loss in fp32, as ours is.
        own_shards: a rank alone computes with its shards, and puts gradients where activations
            were, as ours does.
        tiled: the MLP of a block works on slices of the tokens, each computed again.
        tiled_shards: number of slices, None: one for every `hidden_size` tokens.
        float8: how 8-bit matmuls of the blocks are scaled: `tensorwise` or `rowwise`.
        shares_inputs: adapted linears of one input are computed together, as ours are.
        on_gpu: a rank has a GPU; else it is a process of a host.
        document_len: tokens that attend to each other, where rows hold several documents; None:
            a row is one document.
    """

    parallel: ParallelPlan
    micro_batch: int
    accumulation: int
    sequence_len: int
    policy: Policy
    precision: Precision
    trained: int
    adapters: int = 0
    lora_rank: int = 0
    shares_inputs: bool = True
    budget: float = 0.9
    reshard: bool = True
    compiled: bool = True
    loss_kernel: LossKernel = "in_place"
    loss_chunk: int = 2048
    offload: bool = False
    steps_early: bool = False
    syncs_each: bool = True
    frozen_whole: bool = False
    document_len: float | None = None
    on_gpu: bool = True
    recompute_inside: bool = True
    sums_head: bool = True
    own_shards: bool = True
    tiled: bool = False
    tiled_shards: int | None = None
    float8: str | None = None

    @property
    def local_tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * -(-self.sequence_len // self.parallel.cp)

    @property
    def step_tokens(self) -> int:
        """Tokens of one step over all ranks."""
        rows = self.micro_batch * self.accumulation * self.parallel.data_ranks
        return rows * self.sequence_len

    @property
    def rebuilds(self) -> bool:
        """Whether matrix products of a block are done again in its backward pass."""
        return self.policy in ("alternate", "attention", "full")

    @property
    def gathers_again(self) -> bool:
        """Whether blocks gather the tokens that tp ranks share once more backwards.

        Compiled ones do, where they are not rebuilt: what is has gathered them then. Products that
        are computed while tokens travel always do.
        """
        compiled = self.compiled and not self.rebuilds
        return self.parallel.sequence_parallel and (compiled or self.parallel.overlaps)

    @property
    def copies_weights(self) -> bool:
        """Whether a rank alone computes with copies of its weights."""
        return not self.own_shards or self.precision.weight != self.precision.compute

    @property
    def reuses_activations(self) -> bool:
        """Whether gradients take the memory of activations that the backward pass is done with.

        Those that are summed over ranks come from another stream, whose memory is its own; and
        those of a step's first micro-batch are there before the second one's activations.
        """
        return self.own_shards and self.parallel.is_alone and self.accumulation == 1

    @property
    def fsdp(self) -> int:
        """Ranks that share the states of one copy, beside tp."""
        return self.parallel.dp_shard * self.parallel.cp


def setting_of(
    recipe: Recipe,
    facts: ModelFacts,
    parallel: ParallelPlan,
    batch: BatchPlan,
    *,
    policy: Policy | None = None,
    on_cuda: bool = True,
    device_gib: float = _USUAL_DEVICE_GIB,
) -> Setting:
    """The setting a recipe asks for on a mesh; `policy` replaces its own.

    Args:
        device_gib: memory of a device, which decides whether a frozen base is sharded.
    """
    compiled = on_cuda if recipe.torch_compile == "auto" else bool(recipe.torch_compile)
    adapters = 0
    if recipe.adapter is not None:
        adapters = lora_parameters(facts, recipe.lora_r, targets=_targets(recipe))
    precision = precision_of(recipe, on_cuda=on_cuda)
    trained = _trained(recipe, facts)
    device_bytes = device_gib * 1024**3 if on_cuda else 0.0
    return Setting(
        parallel=parallel,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        sequence_len=recipe.sequence_len,
        policy=policy or policy_of(recipe, compiled=compiled),
        precision=precision,
        trained=trained,
        adapters=adapters,
        lora_rank=recipe.lora_r if recipe.adapter is not None else 0,
        shares_inputs=_shares_inputs(recipe, parallel),
        budget=recipe.activation_memory_budget,
        reshard=recipe.reshard_after_forward is not False,
        compiled=compiled,
        # The engine's kernel is for a whole vocabulary.
        loss_kernel="in_place" if on_cuda and parallel.tp == 1 else "written_out",
        on_gpu=on_cuda,
        frozen_whole=frozen_is_whole(
            recipe, facts, precision, parallel.tp, device_gib if on_cuda else 0.0
        ),
        loss_chunk=recipe.loss_chunk_tokens,
        offload=recipe.activation_offloading,
        syncs_each=syncs_each_batch(
            recipe.sync_each_batch,
            (trained + adapters) / parallel.tp,
            device_bytes,
            reduced_in=precision.reduce,
        ),
        steps_early=recipe.optimizer_in_backward,
        tiled=recipe.tiled_mlp,
        tiled_shards=recipe.tiled_mlp_num_shards,
        float8=float8_kind(recipe),
    )


def slice_length(tokens: int, hidden_size: int, shards: int | None) -> int:
    """Tokens that pass a tiled MLP at one time; the last slice may be shorter.

    Without a number of slices there is one for every `hidden_size` tokens, as in ALST (Bekman et
    al. 2025): its intermediate values then take the memory of a weight matrix.
    """
    return min(tokens, hidden_size) if shards is None else -(-tokens // shards)


def _shares_inputs(recipe: Recipe, parallel: ParallelPlan) -> bool:
    """Whether adapters are of the plain kind that is computed together."""
    shaped = recipe.lora_dropout or recipe.peft_use_dora or recipe.fp8
    quantised = recipe.load_in_4bit or recipe.load_in_8bit
    return parallel.tp == 1 and not (shaped or quantised)


def float8_kind(recipe: Recipe) -> str | None:
    """How 8-bit matmuls are scaled, None without them."""
    return "tensorwise" if recipe.fp8 is True else recipe.fp8 or None


def syncs_each_batch(
    wanted: bool | Literal["auto"], trained: float, device_bytes: float, *, reduced_in: float
) -> bool:
    """Whether gradients are summed over ranks at each micro-batch instead of once a step.

    Args:
        wanted: the recipe's `sync_each_batch`.
        trained: parameters that one rank trains, before sharding.
        device_bytes: memory of a device; 0 for ranks that share a host's.
        reduced_in: bytes of a gradient on its way. In less than fp32 none is kept for later: it
            would be rounded with each micro-batch that is added to it.
    """
    if reduced_in < _FP32_BYTES:
        return True
    if wanted != "auto":
        return wanted
    return 4 * trained > GRADIENT_SHARE * device_bytes


def policy_of(recipe: Recipe, *, compiled: bool) -> Policy:
    """The recipe's activation policy; a compiled block has a budget unless that is 1."""
    value = recipe.gradient_checkpointing
    if value is True or value == "full":
        return "full"
    if value == "attention":
        return "attention"
    return "budget" if compiled and recipe.activation_memory_budget < 1 else "none"


def frozen_is_whole(
    recipe: Recipe, facts: ModelFacts, precision: Precision, tp: int, device_gib: float
) -> bool:
    """Whether every rank holds the frozen base of an adapter whole.

    Args:
        device_gib: memory of a device; 0 for ranks that share a host's, and so shard the base.
    """
    if recipe.adapter is None or recipe.shard_frozen is True:
        return False
    if recipe.shard_frozen is False:
        return True
    held = count_parameters(facts) * precision.frozen / tp
    return held < FROZEN_SHARE * device_gib * 1024**3


def precision_of(recipe: Recipe, *, on_cuda: bool) -> Precision:
    """Bytes a parameter takes by the recipe's dtypes and optimizer."""
    half = recipe.bf16 is True or (recipe.bf16 == "auto" and on_cuda)
    weight = 4 if recipe.param_dtype == "fp32" else 2
    name = next((name for name in _MOMENTS if recipe.optimizer.startswith(name)), "adam")
    moment = _MOMENT_BYTES[recipe.optimizer_state_dtype]
    if "8bit" in recipe.optimizer:
        moment = 1
    frozen = 2.0 if half else 4.0
    if recipe.load_in_4bit:
        frozen = 0.56  # two weights a byte and a scale for every 64
    elif recipe.load_in_8bit:
        frozen = 1.05
    return Precision(
        weight=weight,
        gradient=weight,
        optimizer=_MOMENTS[name] * moment,
        frozen=frozen,
        compute=2 if half else 4,
        reduce=2 if half and recipe.reduce_dtype == "bf16" else 4,
    )


def _targets(recipe: Recipe) -> tuple[str, ...] | None:
    """Names of the linears that get adapters; None = every one."""
    named = recipe.lora_target_modules
    if recipe.lora_target_linear or named is None or isinstance(named, str):
        return None
    return named


def _trained(recipe: Recipe, facts: ModelFacts) -> int:
    """Parameters of the model itself that are trained."""
    if recipe.adapter is not None:
        words = [*map(re.escape, recipe.lora_modules_to_save), *recipe.unfrozen_parameters]
    elif recipe.unfrozen_parameters:
        words = [*recipe.unfrozen_parameters]
    else:
        return count_parameters(facts)
    named = model_parameters(facts) if words else ()
    return sum(p.numel for p in named if any(re.search(word, p.name) for word in words))
