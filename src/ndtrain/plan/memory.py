"""Memory of one GPU by part, from sizes and calibrated constants.

States are counted exactly. Activations are the tensors a block keeps for its backward pass, per
token: f is the feed-forward width, h the hidden size, q and k the widths of all query and of all
key heads. Everything else is small beside them. With sequence parallelism s is h over tp: the
hidden features of a token, on average over the ranks that share the tokens.
"""

from dataclasses import dataclass, fields
from functools import cache

from ndtrain.plan.calibration import Calibration
from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.hardware import GIB
from ndtrain.plan.numbers import along
from ndtrain.plan.setting import ATTENTION_BUDGET, Setting, slice_length
from ndtrain.plan.shapes import (
    ParamShape,
    count_parameters,
    kinds_of_layers,
    layer_parameters,
)

_HEAD_GRADIENT = 4
_SUMMED_GRADIENT = 4
_FP32_LOGIT = 12
"""Bytes beside the logit itself: its value, its log probability and its gradient in fp32."""
_WRITTEN_LOGIT = 18
"""Bytes beside the logit itself: its difference from the largest, probability, hit and gradient in
fp32, and two masks."""
_KEPT_BY_BUDGET = ((0.7, 1.0), (0.5, 0.825), (0.4, 0.61), (0.3, 0.52), (0.2, 0.30), (0.1, 0.22))
"""Budget of the compiler -> activations kept relative to what budgets from 0.7 up keep."""


@dataclass(frozen=True)
class MemorySplit:
    """Predicted bytes of one GPU at the peak of a step.

    Attributes:
        gradients: those for which activations leave no room when the backward pass frees them.
        workspace: one block being recomputed, and gradients of intermediate values.
        loss: logits of one chunk and the hidden states handed to it.
        buffers: gathered weights, gradients being reduced, exchanged heads or keys.
        overhead: what the allocator loses, and a fixed part.
        context: CUDA and NCCL, outside torch's pool; on a host the loaded libraries.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    loss: float
    buffers: float
    overhead: float
    context: float

    @property
    def reserved(self) -> float:
        """What torch reserves: everything but the context."""
        parts: list[float] = [getattr(self, field.name) for field in fields(self)]
        return sum(parts) - self.context

    @property
    def total(self) -> float:
        """What the device shows as used."""
        return self.reserved + self.context

    def gib(self) -> dict[str, float]:
        """The parts in GiB."""
        return {field.name: getattr(self, field.name) / GIB for field in fields(self)}


@dataclass(frozen=True)
class LocalSizes:
    """Parameters one tensor-parallel rank holds, before sharding.

    Attributes:
        layer: the largest layer.
        ends: embedding and head.
        total: everything.
    """

    layer: float
    ends: float
    total: float


@cache
def local_sizes(facts: ModelFacts, tp: int) -> LocalSizes:
    """The parameters of a tensor-parallel rank."""
    layers = [
        (sum(local_numel(part, facts, tp) for part in layer_parameters(facts, layer)), count)
        for layer, count in kinds_of_layers(facts)
    ]
    ends = facts.vocab_size * facts.hidden_size / tp * (1 if facts.tied_embeddings else 2)
    total = sum(size * count for size, count in layers) + ends + facts.hidden_size
    return LocalSizes(max(size for size, _ in layers), ends, total)


def local_share(facts: ModelFacts, tp: int) -> float:
    """Share of the model's parameters that one of `tp` ranks holds."""
    return local_sizes(facts, tp).total / max(1.0, local_sizes(facts, 1).total)


def trained_locally(facts: ModelFacts, setting: Setting) -> float:
    """Trained parameters of a tensor-parallel rank with its adapters, before they are sharded."""
    tp = setting.parallel.tp
    return setting.trained * local_share(facts, tp) + setting.adapters / tp


def local_numel(part: ParamShape, facts: ModelFacts, tp: int) -> float:
    """Elements of a parameter on one of `tp` ranks, on average."""
    if part.style == "whole" or (part.style == "kv" and facts.num_kv_heads % tp):
        return part.numel
    return part.numel / tp


def intermediate_bytes(facts: ModelFacts, setting: Setting) -> float:
    """Bytes of one block's intermediate values per token, each counted once."""
    f, _, q, k = _widths(facts, setting.parallel.tp)
    return setting.precision.compute / 2 * (8 * f + 8 * _shared(facts, setting) + 4 * q + 4 * k)


def kept_bytes(facts: ModelFacts, setting: Setting, constants: Calibration) -> float:
    """Bytes one block keeps per token for its backward pass."""
    f, h, q, k = _widths(facts, setting.parallel.tp)
    if setting.tiled:
        # of an MLP its input is kept and nothing else
        f, h = 0, facts.hidden_size
    s = h / setting.parallel.tp if setting.parallel.sequence_parallel else h
    log_sums = 4 * facts.num_heads / setting.parallel.tp
    norms = 2 * (q + k) if facts.qk_norm else 0
    if setting.policy == "full":
        kept = 2 * s
    elif setting.policy == "alternate":
        kept = 2 * s + (2 * h + 2 * q + 2 * f + 2 * k) + log_sums
    elif setting.policy == "attention" and not setting.compiled:
        kept = 2 * s + 2 * q + log_sums
    elif setting.policy == "attention" and setting.tiled:
        kept = 4 * s + 2 * q + log_sums
    elif not setting.compiled:
        # What attention and MLP read is whole.
        kept = 8 * f + 14 * s + 4 * h + 2 * q + 4 * k + log_sums + 2 * norms
    elif setting.policy in ("budget", "attention"):
        # the input of a tiled MLP is kept, where the compiler would make it again
        again = 2 * s if setting.tiled else 0
        kept = constants.kept_budget * (4 * f + 4 * s + again + 4 * q + 4 * k + log_sums + norms)
        kept *= along(
            _KEPT_BY_BUDGET, ATTENTION_BUDGET if setting.policy == "attention" else setting.budget
        )
    else:
        # What is gathered again is not kept: of what is shared there are the two residual sums.
        stream = 4 * s if setting.gathers_again else 8 * h
        kept = constants.kept * (6 * f + stream + 4 * q + 4 * k + log_sums + norms)
    if not setting.rebuilds:
        kept += _exchanged_bytes(facts, setting)
    return kept * setting.precision.compute / 2


def _exchanged_bytes(facts: ModelFacts, setting: Setting) -> float:
    """What a block keeps besides because of context parallelism, per token of a rank.

    Ulysses: attention's output as attention gave it and as it came back to this rank's tokens.
    All-gather: the keys and values of the other ranks.
    """
    parallel = setting.parallel
    if parallel.cp == 1:
        return 0.0
    _, _, q, k = _widths(facts, parallel.tp)
    return 2 * q if parallel.cp_method == "ulysses" else 4 * k * (parallel.cp - 1)


def predict_memory(facts: ModelFacts, setting: Setting, constants: Calibration) -> MemorySplit:
    """The memory of one GPU at the peak of a step."""
    sizes = local_sizes(facts, setting.parallel.tp)
    tokens, tp = setting.local_tokens, setting.parallel.tp
    weights, gradients, optimizer = _states(sizes, setting, facts)
    layers, compute = facts.num_layers, setting.precision.compute
    kept = kept_bytes(facts, setting, constants)
    activations = layers * kept * tokens + _score_bytes(facts, setting)
    if setting.offload:
        activations = 2 * kept * tokens
    if setting.reuses_activations:
        gradients = max(0.0, gradients - activations)
    workspace = _workspace(facts, setting, constants)
    h = _widths(facts, tp)[1]
    chunk = min(setting.loss_chunk, tokens)
    logit = {
        "in_place": compute,
        # Logits and their gradient.
        "compiled": 2 * compute,
        "cross_entropy": constants.logit_bytes_eager,
        "fp32_cross_entropy": _FP32_LOGIT + compute,
        "written_out": _WRITTEN_LOGIT + compute,
    }[setting.loss_kernel]
    loss = 2 * compute * h * tokens + chunk * facts.vocab_size / tp * logit
    if setting.trained:
        # The head's gradient is summed up over the chunks in fp32, each chunk's beside it.
        gradient = compute + (_HEAD_GRADIENT if setting.sums_head else 0)
        loss += facts.vocab_size / tp * facts.hidden_size * gradient
    buffers = _buffers(sizes, facts, setting)
    used = weights + gradients + optimizer + activations + workspace + loss + buffers
    context, base = constants.process_gib, 0.0
    if setting.on_gpu:
        context, base = constants.context_gib, constants.base_gib
        if setting.parallel.world_size > 1:
            context += constants.nccl_gib
    return MemorySplit(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        workspace=workspace,
        loss=loss,
        buffers=buffers,
        overhead=used * constants.fragmentation + base * GIB,
        context=context * GIB,
    )


def _workspace(facts: ModelFacts, setting: Setting, constants: Calibration) -> float:
    """Values of a block that is computed again, gradients of intermediate values, and, where its
    MLP is tiled, what its slices leave to each other."""
    f, h, q, k = _widths(facts, setting.parallel.tp)
    tokens, width = setting.local_tokens, setting.precision.compute / 2
    if not setting.tiled:
        stream = 4 * h + 4 * _shared(facts, setting)
        rebuilt = (6 * f + stream + 4 * q + 4 * k) * tokens if setting.rebuilds else 0.0
        return width * (rebuilt + constants.workspace * (8 * f + 8 * h) * tokens)
    own = facts.hidden_size
    piece = slice_length(tokens, own, setting.tiled_shards)
    # what the MLP makes of a token exists for one slice: wide values, and copies for experts
    rebuilt = (6 * f + 8 * (h - own)) * piece
    if setting.rebuilds:
        rebuilt += (8 * own + 4 * q + 4 * k) * tokens
    gradients = 8 * own * tokens + (8 * f + 8 * (h - own)) * piece
    total = width * (rebuilt + constants.workspace * gradients)
    if piece < tokens:
        trained = setting.trained / count_parameters(facts)
        # a slice's gradients of weights, and their sum in fp32
        held = setting.precision.compute + _SUMMED_GRADIENT
        total += trained * _mlp_numel(facts, setting.parallel.tp) * held
    return total


def _mlp_numel(facts: ModelFacts, tp: int) -> float:
    """Parameters of the largest MLP on a tensor-parallel rank."""
    return max(
        sum(
            local_numel(part, facts, tp)
            for part in layer_parameters(facts, layer)
            if ".mlp." in part.name
        )
        for layer, _ in kinds_of_layers(facts)
    )


def score_matrix_bytes(facts: ModelFacts, sequence_len: int) -> int:
    """The attention scores of one layer and one row, were they written out in bf16."""
    return facts.num_heads * sequence_len**2 * 2


def _widths(facts: ModelFacts, tp: int) -> tuple[float, float, float, float]:
    """f, h, q and k of one rank; a mixture counts the experts that see a token."""
    dense = facts.intermediate_size
    if facts.num_experts:
        active = facts.experts_per_token * facts.expert_intermediate_size
        active += facts.shared_expert_size
        share = facts.num_moe_layers / facts.num_layers
        dense = round(active * share + dense * (1 - share))
    split = tp if facts.family.tp_mlp else 1
    heads = tp if facts.family.tp_attention == "heads" else 1
    # Each expert's input and output is a copy of the token.
    hidden = facts.hidden_size * (1 + 0.5 * facts.experts_per_token)
    keys = facts.kv_size / heads if facts.num_kv_heads % heads == 0 else facts.head_dim
    return dense / split, hidden, facts.q_size / heads, keys


def _shared(facts: ModelFacts, setting: Setting) -> float:
    """h where nothing is split by features: with sequence parallelism a share of the tokens."""
    parallel = setting.parallel
    _, h, _, _ = _widths(facts, parallel.tp)
    return h / parallel.tp if parallel.sequence_parallel else h


def _states(sizes: LocalSizes, setting: Setting, facts: ModelFacts) -> tuple[float, float, float]:
    precision, share = setting.precision, setting.fsdp
    trained = trained_locally(facts, setting)
    frozen = max(0.0, sizes.total - setting.trained * local_share(facts, setting.parallel.tp))
    # Embedding and head stay as they are computed with when the linears are held in few bits.
    plain = min(frozen, sizes.ends) if precision.frozen < precision.compute else 0.0
    held = plain * precision.compute + (frozen - plain) * precision.frozen
    weights = held / (1 if setting.frozen_whole else share) + trained * precision.weight / share
    gradients = trained * precision.gradient / share
    if setting.steps_early:
        gradients = min(gradients, 2 * sizes.layer * precision.gradient)
    return weights, gradients, trained * precision.optimizer / share


def _buffers(sizes: LocalSizes, facts: ModelFacts, setting: Setting) -> float:
    """Weights gathered for a pass, gradients on their way, and what context parallelism holds."""
    compute, parallel = setting.precision.compute, setting.parallel
    total = 0.0
    if setting.fsdp > 1 and not setting.frozen_whole:
        layers = 2 * sizes.layer if setting.reshard else sizes.total - sizes.ends
        total += (layers + sizes.ends) * compute
        if setting.trained:
            total += 2 * sizes.layer * compute
    elif setting.fsdp == 1 and setting.trained and setting.copies_weights and not setting.reshard:
        # One rank casts its weights, block by block unless it is told not to free them.
        total += sizes.total * compute
    if setting.fsdp > 1 and setting.accumulation > 1 and not setting.syncs_each:
        total += 4 * trained_locally(facts, setting)
    if parallel.cp > 1:
        _, _, q, k = _widths(facts, parallel.tp)
        if parallel.cp_method == "ulysses":
            total += 2 * (2 * q + 2 * k) * compute * setting.local_tokens
        else:
            whole = setting.local_tokens * parallel.cp
            total += 2 * k * (compute + 4) * whole
    return total


def _score_bytes(facts: ModelFacts, setting: Setting) -> float:
    """Score matrices of models whose attention is not fused; one block at a time."""
    if not (facts.softcap or facts.sinks):
        return 0.0
    parallel = setting.parallel
    heads = facts.num_heads / (parallel.tp if facts.family.tp_attention == "heads" else 1)
    scores = heads * setting.sequence_len**2 / parallel.cp * setting.micro_batch
    blocks = 1 if setting.rebuilds else facts.num_layers
    return scores * (4 + setting.precision.compute) * blocks
