"""How `plan` reads: tables for people, a mapping for scripts."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.hardware import GIB, Cluster
from ndtrain.plan.memory import score_matrix_bytes
from ndtrain.plan.plan import AXES
from ndtrain.plan.search import Candidate
from ndtrain.plan.step_time import flops_per_token

_AXIS_WORDS = {"dp_replicate": "repl.", "dp_shard": "shard", "cp": "cp", "tp": "tp"}
_MEMORY_PARTS = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optim.",
    "activations": "activ.",
    "workspace": "work",
    "loss": "loss",
    "buffers": "exch.",
    "overhead": "alloc.",
    "context": "CUDA",
}
_TIME_PARTS = (
    "matmul",
    "attention",
    "elementwise",
    "loss",
    "optimizer",
    "replicate",
    "fsdp",
    "cp",
    "tp",
)
_LONG_STEP = 100.0
_TIME_WORDS = {
    "attention": "attn.",
    "elementwise": "elem.",
    "optimizer": "optim.",
    "replicate": "+repl.",
    "fsdp": "+shard",
    "cp": "+cp",
    "tp": "+tp",
}


def mesh_table(candidates: Sequence[Candidate], own: Candidate | None) -> Table:
    """The ranked meshes, within 80 columns; a star marks the recipe's own mesh.

    `micro` is the micro-batch, `accum` its accumulation, `recompute` the activation policy (~ with
    tiled MLPs), GiB the memory of one GPU.
    """
    starred = None if own is None else own.parallel.sizes
    has_own = any(candidate.parallel.sizes == starred for candidate in candidates)
    fits = any(candidate.fits for candidate in candidates)
    star = "; * the recipe's own" if has_own else ""
    tiled = "; ~ with tiled_mlp: true" if any(one.setting.tiled for one in candidates) else ""
    table = _table(f"Meshes, {'best' if fits else 'the least memory'} first{star}{tiled}")
    names = ("micro", "accum", "recompute", "GiB", "tokens/s")
    for name in ("#", *_AXIS_WORDS.values(), *names):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for number, candidate in enumerate(candidates, 1):
        setting = candidate.setting
        table.add_row(
            f"{number}{'*' if candidate.parallel.sizes == starred else ''}",
            *(str(size) for size in candidate.parallel.sizes),
            str(setting.micro_batch),
            str(setting.accumulation),
            f"{setting.policy}{'~' if setting.tiled else ''}",
            f"{candidate.memory.total / GIB:.1f}",
            f"{candidate.tokens_per_second:,.0f}",
            "yes" if candidate.fits else "no",
        )
    return table


LEGEND = (
    "optim. optimizer, activ. activations, work workspace, exch. exchange buffers, alloc. the "
    "allocator's rest,\nattn. attention, elem. elementwise, + an exchange that nothing hides "
    "(repl. and shard: dp_replicate, dp_shard)."
)
"""What the short words of the detailed tables mean."""


def memory_table(candidates: Sequence[Candidate]) -> Table:
    """GiB of one GPU by part."""
    table = _table("Memory of one GPU, GiB")
    words = dict(_MEMORY_PARTS)
    if not all(candidate.setting.on_gpu for candidate in candidates):
        table.title, words["context"] = "Memory of one process, GiB", "libs"
    table.add_column("#", justify="right", no_wrap=True)
    for word in (*words.values(), "total"):
        table.add_column(word, justify="right", no_wrap=True)
    for number, candidate in enumerate(candidates, 1):
        parts = candidate.memory.gib()
        values = [parts[name] for name in _MEMORY_PARTS] + [candidate.memory.total / GIB]
        table.add_row(str(number), *(f"{value:.1f}" for value in values))
    return table


def time_table(candidates: Sequence[Candidate]) -> Table:
    """Milliseconds of a step by part, or seconds of a long one; + is what nothing hides."""
    short = all(candidate.time.total < _LONG_STEP for candidate in candidates)
    unit, scale = ("ms", 1e3) if short else ("s", 1.0)
    table = _table(f"Time of a step, {unit} (+ exchange that nothing hides)")
    table.add_column("#", justify="right", no_wrap=True)
    for name in (*_TIME_PARTS, "total"):
        table.add_column(_TIME_WORDS.get(name, name), justify="right", no_wrap=True)
    for number, candidate in enumerate(candidates, 1):
        parts = [getattr(candidate.time, name) for name in _TIME_PARTS]
        values = [*parts, candidate.time.total]
        table.add_row(str(number), *(f"{scale * value:,.0f}" for value in values))
    return table


def traffic_table(candidates: Sequence[Candidate], cluster: Cluster) -> Table:
    """Gigabytes one GPU sends a step, by axis, with the link each axis uses."""
    table = _table("Sent by one GPU a step, GB, and over which link")
    table.add_column("#", justify="right", no_wrap=True)
    for name in _AXIS_WORDS.values():
        table.add_column(name, justify="right", no_wrap=True)
    for number, candidate in enumerate(candidates, 1):
        parallel = candidate.parallel
        group = parallel.dp_shard * parallel.cp * parallel.tp
        spans = {
            "dp_replicate": parallel.world_size,
            "dp_shard": group,
            "cp": parallel.cp * parallel.tp,
            "tp": parallel.tp,
        }
        cells = []
        for name in AXES:
            sent = getattr(candidate.traffic, name)
            link = cluster.link_over(spans[name]).name
            cells.append(f"{sent / 1e9:,.1f} {link}" if sent else "-")
        table.add_row(str(number), *cells)
    return table


def describe_scores(facts: ModelFacts, sequence_len: int, best: Candidate | None) -> str:
    """What whole attention scores would take, and what spares them."""
    size = score_matrix_bytes(facts, sequence_len)
    text = (
        f"attention scores written out would take {human_bytes(size)} a layer and row "
        f"({facts.num_heads} heads × {sequence_len:,}² × 2 bytes)"
    )
    if facts.softcap or facts.sinks:
        kind = "softcap" if facts.softcap else "sinks"
        return f"{text}; {facts.model_type} needs them for its {kind}, split over cp and tp."
    spared = "fused attention never writes them"
    if best is not None and best.parallel.cp > 1:
        spared += f", and cp {best.parallel.cp} leaves each rank 1/{best.parallel.cp} of the work"
    return f"{text}; {spared}."


def describe_cluster(cluster: Cluster, limit: float, *, assumed: bool, on_cpu: bool = False) -> str:
    """One line on the machines a plan is for."""
    gpu, rates = cluster.gpu, ""
    if cluster.rates == "measured":
        rates = f" Rates measured on this machine on {gpu.date}."
    if not cluster.has_gpus:
        hosts = f"{cluster.nodes} hosts like this one" if cluster.nodes > 1 else "this host"
        return (
            f"{cluster.world_size} process{'es' if cluster.world_size > 1 else ''} on {hosts} "
            f"({gpu.memory_gib:.1f} GiB a process); "
            f"{limit:.1f} GiB usable.{rates}"
        )
    name = f"GPUs of {gpu.memory_gib:.0f} GiB with the rates of {gpu.name}"
    if not cluster.gpu_is_assumed:
        name = f"{gpu.name} ({gpu.memory_gib:.0f} GiB, {gpu.bf16_tf:.0f} bf16 TFLOP/s)"
    nodes = ""
    if cluster.nodes > 1:
        nodes = f" in {cluster.nodes} nodes over {cluster.inter.name}"
    link = f", {cluster.intra.name} inside a node" if cluster.gpus_per_node > 1 else ""
    note = " No GPU was named or found: assumed." if assumed else ""
    if assumed and on_cpu:
        note = (
            " The recipe trains on a CPU, and these figures are not its own: --measure measures "
            "this machine and plans for it."
        )
    return f"{cluster.world_size} × {name}{nodes}{link}; {limit:.1f} GiB usable.{rates}{note}"


def human_bytes(size: float) -> str:
    """`1.00 TiB`, `64 MiB`."""
    for unit, scale in (("TiB", 1024 * GIB), ("GiB", GIB), ("MiB", 1024**2)):
        if size >= scale:
            value = size / scale
            return f"{value:.2f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{size / 1024:.0f} KiB"


def candidate_json(facts: ModelFacts, candidate: Candidate, cluster: Cluster) -> dict[str, Any]:
    """One candidate for scripts."""
    setting = candidate.setting
    per_gpu = candidate.tokens_per_second_per_gpu
    flops = flops_per_token(facts, setting.sequence_len, frozen=bool(setting.lora_rank))
    return {
        **dict(zip(AXES, candidate.parallel.sizes, strict=True)),
        "cp_method": candidate.parallel.cp_method,
        "sequence_parallel": candidate.parallel.sequence_parallel,
        "async_tensor_parallel": candidate.parallel.overlaps,
        "micro_batch_size": setting.micro_batch,
        "gradient_accumulation_steps": setting.accumulation,
        "gradient_checkpointing": setting.policy,
        "tiled_mlp": setting.tiled,
        "fits": candidate.fits,
        "limit_gib": candidate.limit_gib,
        "memory_gib": {**candidate.memory.gib(), "total": candidate.memory.total / GIB},
        "seconds": {**vars(candidate.time), "total": candidate.time.total},
        "bytes_sent": vars(candidate.traffic),
        "tokens_per_second": candidate.tokens_per_second,
        "tokens_per_second_per_gpu": per_gpu,
        "tflops_per_gpu": per_gpu * flops / 1e12,
        "mfu": per_gpu * flops / 1e12 / cluster.gpu.bf16_tf,
    }


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
    )
