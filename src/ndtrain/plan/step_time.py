"""Seconds of one optimizer step by part, from counted work and calibrated rates.

Matrix work is 2 FLOP a weight and token forward and twice that backward (once, where the weights
are frozen). Attention is counted causal. The rest moves bytes. What an exchange costs beyond the
compute it hides behind is `exposed`.
"""

from dataclasses import dataclass, fields

from ndtrain.plan.calibration import Calibration
from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.hardware import Cluster
from ndtrain.plan.matrix_work import done_again, matmul_parameters, mlp_share
from ndtrain.plan.memory import intermediate_bytes, local_sizes, trained_locally
from ndtrain.plan.setting import Setting

_HIDDEN_BEHIND = 0.8
"""Share of the compute time that an exchange can hide behind."""
_SLOWS = 0.12
"""Share of an exchange's time by which it holds up the compute it hides behind: it takes a part of
the GPU for as long as it lasts."""
_NARROW_HIDDEN = 2048
_RECOMPUTED_ELEMENTWISE = 0.3
_UPDATE_BYTES = 40
"""Of a parameter with fp32 weight, gradient and two moments, for which `state` is calibrated."""
_FLOAT8_GAIN = {"tensorwise": 1.4, "rowwise": 1.15}
"""What 8-bit matmuls gain over bf16 ones, casts included; from the whole-step gains of 25 and 10 %
that torchao publishes for Llama-3-8B, where matmuls are about 70 % of a step."""
_TP_REDUCTIONS = 4
"""All-reduces of hidden states a block: two forward, two backward. With sequence parallelism each
is an all-gather and a reduce-scatter, which together send as much."""


@dataclass(frozen=True)
class TimeSplit:
    """Predicted seconds of a step.

    Attributes:
        elementwise: norms, activations, casts of weights.
        loss: what the logits cost beside their matrix work.
        optimizer: the update and gradient clipping.
        fsdp: exposed gathering of weights and reduction of gradients.
        replicate: exposed all-reduce between copies.
        tp: exchange of hidden states; nothing hides it but products of `async_tensor_parallel`.
        cp: exchange of heads, or of keys and values.
    """

    matmul: float
    attention: float
    elementwise: float
    loss: float
    optimizer: float
    fsdp: float
    replicate: float
    tp: float
    cp: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        parts: list[float] = [getattr(self, field.name) for field in fields(self)]
        return sum(parts)


@dataclass(frozen=True)
class Traffic:
    """Bytes one GPU sends a step, by axis."""

    dp_replicate: float
    dp_shard: float
    cp: float
    tp: float


def attended_keys(facts: ModelFacts, length: float) -> float:
    """Keys a token attends to on average over layers, times two: the length, where causal."""
    window = facts.sliding_window
    if window is None:
        return length
    local = min(length, 2 * window)
    share = facts.num_window_layers / facts.num_layers
    return share * local + (1 - share) * length


def flops_per_token(facts: ModelFacts, length: int, *, frozen: bool = False) -> float:
    """Model FLOP of a trained token, attention counted causal, recomputation not counted."""
    times = 4 if frozen else 6
    width = facts.num_heads * (facts.head_dim + facts.value_head_dim) / 2
    attention = 6 * facts.num_layers * width * attended_keys(facts, length)
    return times * matmul_parameters(facts) + attention


def predict_time(
    facts: ModelFacts, setting: Setting, cluster: Cluster, constants: Calibration
) -> TimeSplit:
    """Seconds of one step of one rank; all ranks do equally much."""
    gpu, tp = cluster.gpu, setting.parallel.tp
    tokens, passes = setting.local_tokens, setting.accumulation
    bandwidth = gpu.memory_gbs * 1e9
    sizes = local_sizes(facts, tp)

    matmul = _matmul_flops(facts, setting) / _matmul_rate(facts, tp, cluster, constants)
    if setting.float8:
        matmul /= _FLOAT8_GAIN[setting.float8]
    attention = _attention_flops(facts, setting) / _attention_rate(
        facts, setting, cluster, constants
    )
    values = intermediate_bytes(facts, setting) * facts.num_layers * tokens
    moved = values * constants.elementwise
    if not setting.compiled:
        moved *= constants.elementwise_eager
    elif setting.policy == "budget":
        moved *= constants.elementwise_budget
    if setting.rebuilds:
        moved *= 1 + _RECOMPUTED_ELEMENTWISE
    elif setting.tiled:
        moved *= 1 + _RECOMPUTED_ELEMENTWISE * mlp_share(facts)
    if setting.trained and setting.precision.weight != setting.precision.compute:
        moved += constants.cast * sizes.total
    if setting.lora_rank:
        factor = constants.lora_shared if setting.shares_inputs else constants.lora
        moved += factor * _adapter_bytes(facts, tp) * tokens
    logit = {
        "in_place": constants.loss_in_place,
        "compiled": constants.loss_compiled,
    }.get(setting.loss_kernel, constants.loss_eager)
    loss = tokens * facts.vocab_size / tp * logit / bandwidth
    updated = trained_locally(facts, setting) / setting.fsdp
    state = updated * constants.state * _update_bytes(setting) / _UPDATE_BYTES
    compute = matmul + attention + (moved / bandwidth) + loss
    fsdp, replicate = _data_exchange(facts, setting, cluster, constants, compute)
    return TimeSplit(
        matmul=passes * matmul,
        attention=passes * attention,
        elementwise=passes * moved / bandwidth,
        loss=passes * loss,
        optimizer=state / bandwidth,
        fsdp=fsdp,
        replicate=replicate,
        tp=passes * _tp_exchange(facts, setting, cluster, constants, matmul),
        cp=passes * _cp_exchange(facts, setting, cluster, constants),
    )


def predict_traffic(facts: ModelFacts, setting: Setting) -> Traffic:
    """Bytes one GPU sends in one step."""
    passes = setting.accumulation
    gather, reduce = _fsdp_bytes(facts, setting)
    return Traffic(
        dp_replicate=_replicate_bytes(facts, setting),
        dp_shard=passes * gather + _reductions(setting) * reduce,
        cp=passes * _cp_bytes(facts, setting),
        tp=passes * _tp_bytes(facts, setting),
    )


def _update_bytes(setting: Setting) -> float:
    """Bytes an update moves per parameter: weight and moments are read and written, the gradient
    is read for the norm, scaled and read again."""
    held = setting.precision
    return 2 * held.weight + 4 * held.gradient + 2 * held.optimizer


def _matmul_flops(facts: ModelFacts, setting: Setting) -> float:
    """Matrix work of one micro-batch on one rank, with recomputation."""
    head = facts.vocab_size * facts.hidden_size
    weights = matmul_parameters(facts)
    blocks = weights - head
    times = 3.0 if setting.trained and not setting.lora_rank else 2.0
    again = done_again(facts, setting)
    # Attention that tensor parallelism does not split is computed by every rank.
    total = 2 * (times * weights + again * blocks) * setting.local_tokens
    return total / setting.parallel.tp


def _attention_flops(facts: ModelFacts, setting: Setting) -> float:
    width = facts.num_heads * (facts.head_dim + facts.value_head_dim) / 2
    length = min(setting.sequence_len, setting.document_len or setting.sequence_len)
    forward = 2 * width * attended_keys(facts, length) * setting.local_tokens
    times = 4.0 if setting.policy == "full" else 3.0
    split = setting.parallel.tp if facts.family.tp_attention == "heads" else 1
    return times * forward * facts.num_layers / split


def _matmul_rate(facts: ModelFacts, tp: int, cluster: Cluster, constants: Calibration) -> float:
    narrow: float = min(1.0, facts.hidden_size / _NARROW_HIDDEN) ** constants.narrow_matmul
    share = constants.matmul * narrow
    if tp > 1:
        share *= constants.tp_matmul
    if facts.num_experts:
        share *= constants.moe_matmul
    return share * cluster.gpu.bf16_tf * 1e12


def _attention_rate(
    facts: ModelFacts, setting: Setting, cluster: Cluster, constants: Calibration
) -> float:
    narrow = facts.head_dim < 128
    share = constants.attention_narrow_head if narrow else constants.attention
    if setting.document_len is not None:
        share *= constants.attention_varlen
    return share * cluster.gpu.bf16_tf * 1e12


def _adapter_bytes(facts: ModelFacts, tp: int) -> float:
    """What adapters read and write per token beside the layers they sit on."""
    h, f = facts.hidden_size, facts.intermediate_size
    q, k = facts.q_size, facts.kv_size
    inputs, outputs = 4 * h + q + h + f, q + 2 * k + 2 * h + 2 * f
    return 3 * facts.num_layers * (2 * inputs + 4 * outputs) / tp


def _fsdp_bytes(facts: ModelFacts, setting: Setting) -> tuple[float, float]:
    """Bytes of gathering weights and of reducing gradients in one micro-batch."""
    ranks = setting.fsdp
    if ranks == 1:
        return 0.0, 0.0
    away = (ranks - 1) / ranks
    reduced = trained_locally(facts, setting) * setting.precision.reduce * away
    if setting.frozen_whole:
        return 0.0, reduced
    held = local_sizes(facts, setting.parallel.tp).total
    gathers = 2 if setting.reshard else 1
    width = min(setting.precision.compute, setting.precision.weight)
    if setting.lora_rank:
        width = min(width, setting.precision.frozen)
    return gathers * held * width * away, reduced


def _reductions(setting: Setting) -> int:
    """How often a step sums the gradients of its shards."""
    return setting.accumulation if setting.syncs_each else 1


def _replicate_bytes(facts: ModelFacts, setting: Setting) -> float:
    copies = setting.parallel.dp_replicate
    if copies == 1:
        return 0.0
    own = trained_locally(facts, setting) * setting.precision.reduce / setting.fsdp
    # sums in fp32 are made once a step, others with every micro-batch
    times = setting.accumulation if setting.precision.reduce < 4 else 1
    return times * 2 * own * (copies - 1) / copies


def _tp_bytes(facts: ModelFacts, setting: Setting) -> float:
    tp = setting.parallel.tp
    if tp == 1:
        return 0.0
    one = 2 * (tp - 1) / tp * setting.local_tokens * facts.hidden_size * setting.precision.compute
    again = 2 if setting.rebuilds else 0
    if setting.tiled and not (setting.rebuilds and not facts.family.norms_mlp_output):
        # the MLP's own sum, once more: in its slices, or where its output is needed again
        again += 1
    # two gathers a block send as much as one reduction
    again += 1 if setting.gathers_again else 0
    return facts.num_layers * (_TP_REDUCTIONS + again) * one


def _cp_bytes(facts: ModelFacts, setting: Setting) -> float:
    parallel = setting.parallel
    if parallel.cp == 1:
        return 0.0
    away = (parallel.cp - 1) / parallel.cp
    width, tp = setting.precision.compute, parallel.tp
    q, k = facts.q_size / tp, facts.kv_size / tp
    again = 1 if setting.policy == "full" else 0
    if parallel.cp_method == "ulysses":
        one = away * (2 * q + 2 * k) * width * setting.local_tokens
        return facts.num_layers * (2 + again) * one
    whole = setting.local_tokens * parallel.cp
    # Gradients of keys and values are summed in fp32: twice the bytes of their values.
    return facts.num_layers * (3 + again) * away * 2 * k * width * whole


def _data_exchange(
    facts: ModelFacts,
    setting: Setting,
    cluster: Cluster,
    constants: Calibration,
    compute: float,
) -> tuple[float, float]:
    """Exposed seconds of sharding and of replication in one step.

    Args:
        compute: seconds of one micro-batch's computation, behind which an exchange hides.
    """
    parallel = setting.parallel
    group = setting.fsdp * parallel.tp
    gather, reduce = _fsdp_bytes(facts, setting)
    rate = cluster.rate_over(group, "all_gather", constants)
    bandwidth = cluster.gpu.memory_gbs * 1e9

    def exposed(reduced: float) -> float:
        seconds = (gather + reduced) / rate
        # Copies into and out of buffers, and what an exchange takes from kernels beside it.
        copies = (constants.gather_copies * gather + constants.reduce_copies * reduced) / bandwidth
        return max(copies, _SLOWS * seconds, seconds - _HIDDEN_BEHIND * compute)

    reductions = _reductions(setting)
    fsdp = reductions * exposed(reduce) + (setting.accumulation - reductions) * exposed(0.0)
    # copies are summed once, beside the last micro-batch
    seconds = (gather + reduce) / rate
    sent = _replicate_bytes(facts, setting)
    outer = cluster.rate_over(group * parallel.dp_replicate, "all_reduce", constants)
    left = max(0.0, _HIDDEN_BEHIND * compute - seconds)
    least = max(constants.reduce_copies * sent / bandwidth, _SLOWS * sent / outer)
    replicate = max(least, sent / outer - left)
    return fsdp, replicate


def _tp_exchange(
    facts: ModelFacts,
    setting: Setting,
    cluster: Cluster,
    constants: Calibration,
    matmul: float,
) -> float:
    """Exposed seconds of one micro-batch's exchange of hidden states.

    Args:
        matmul: seconds of its matrix products, behind which tokens may travel.
    """
    tp = setting.parallel.tp
    if tp == 1:
        return 0.0
    halves = setting.parallel.sequence_parallel
    calls = facts.num_layers * _TP_REDUCTIONS * (2 if halves else 1)
    rate = cluster.rate_over(tp, "all_gather" if halves else "all_reduce", constants)
    seconds = _tp_bytes(facts, setting) / rate + calls * cluster.link_over(tp).latency_us * 1e-6
    if setting.parallel.overlaps:
        # not measured: sends are taken to hide, and to slow what hides them, as gathers do
        seconds = max(_SLOWS * seconds, seconds - _HIDDEN_BEHIND * matmul)
    return seconds


def _cp_exchange(
    facts: ModelFacts, setting: Setting, cluster: Cluster, constants: Calibration
) -> float:
    parallel = setting.parallel
    if parallel.cp == 1:
        return 0.0
    span = parallel.cp * parallel.tp
    heads = parallel.cp_method == "ulysses"
    rate = cluster.rate_over(span, "all_to_all" if heads else "all_gather", constants)
    calls = facts.num_layers * 4
    return _cp_bytes(facts, setting) / rate + calls * cluster.link_over(span).latency_us * 1e-6
