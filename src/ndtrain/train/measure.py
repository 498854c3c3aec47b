"""`ndtrain plan --measure`: what this machine reaches, read by all of its ranks at once.

Read are a large matrix product, a pass over memory, and the exchanges that sharding, copies and
context parallelism wait for: together on every rank, because that is how a step runs. Ranks share
a host's cores, and a board's power.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from ndtrain.environment import LaunchedRank
from ndtrain.errors import MeshError
from ndtrain.launch import LaunchOptions, launch
from ndtrain.parallel.runtime import Runtime, start, stop
from ndtrain.plan.hardware import GIB, Exchange, local_gpus
from ndtrain.plan.measured import MeasuredMachine, device_name
from ndtrain.plan.plan import plan_mesh
from ndtrain.recipe.schema import Recipe

_REPEATS = 5
# renamed in torch 2.13; 2.11 knows the former name only
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class _Sizes:
    """How large the probes are: enough to hide the start of a kernel, and done in a second.

    Attributes:
        matrix: rows and columns of the product.
        copy_bytes: of the tensor that is read and written.
        exchange_bytes: of the tensor that is whole after an exchange.
    """

    dtype: torch.dtype
    matrix: int
    copy_bytes: int
    exchange_bytes: int


_SIZES = {
    "cuda": _Sizes(torch.bfloat16, 8192, 2**30, 2**28),
    "cpu": _Sizes(torch.float32, 1024, 2**26, 2**24),
}


@dataclass(frozen=True)
class _Job:
    """What a measuring rank gets; the main one writes `result`."""

    device: Literal["cuda", "cpu"]
    result: Path


def measure_machine(recipe: Recipe, ranks: int | None) -> MeasuredMachine:
    """Measure this machine: all its GPUs, or as many processes as a run on the host would have.

    Args:
        recipe: its `device` says which.
        ranks: processes of a host; None: what the recipe's sizes multiply to.

    Raises:
        MeshError: a GPU is asked for and no driver is here, or the ranks could not be started.
    """
    gpus = len(local_gpus()) if recipe.device != "cpu" else 0
    if recipe.device == "cuda" and not gpus:
        raise MeshError(
            "the recipe asks for CUDA, and this machine has no NVIDIA driver.",
            where="--measure",
            hint="Measure on the machine that trains, or name its GPU with --gpu.",
        )
    count = gpus or ranks or plan_mesh(recipe, None).world_size
    with tempfile.TemporaryDirectory(prefix="ndtrain-measure-") as folder:
        job = _Job("cuda" if gpus else "cpu", Path(folder) / "rates.json")
        options = LaunchOptions(world_size=count, run_dir=Path(folder), device=job.device)
        launch(job, _measure_rank, options)
        rates = json.loads(job.result.read_text(encoding="utf-8"))
    return MeasuredMachine(
        device=device_name(on_gpu=bool(gpus)),
        count=count,
        torch=version("torch"),
        on_gpu=bool(gpus),
        date=datetime.now(tz=UTC).date().isoformat(),
        **rates,
    )


def _measure_rank(job: _Job, launched: LaunchedRank | None) -> int:
    runtime = start(launched, device=job.device, timeout_seconds=300)
    failed = True
    try:
        rates = _rates(runtime)
        if runtime.is_main:
            job.result.write_text(json.dumps(rates), encoding="utf-8")
        failed = False
    finally:
        stop(runtime, failed=failed)
    return 0


def _rates(runtime: Runtime) -> dict[str, object]:
    """The readings, the same on every rank: a step waits for the slowest."""
    device, sizes = runtime.device, _SIZES[runtime.device.type]
    n = sizes.matrix
    left = torch.randn(n, n, dtype=sizes.dtype, device=device)
    right = torch.randn(n, n, dtype=sizes.dtype, device=device)
    product = torch.empty_like(left)
    matmul = _seconds(lambda: torch.mm(left, right, out=product), runtime)
    values = torch.zeros(sizes.copy_bytes // 4, device=device)
    moved = _seconds(lambda: values.add_(1.0), runtime)
    exchanges: dict[Exchange, float] = {}
    latency = 0.0
    if runtime.world_size > 1:
        exchanges = _exchanges(runtime, sizes.exchange_bytes)
        few = torch.zeros(8, device=device)
        latency = _seconds(lambda: dist.all_reduce(few), runtime)
    on_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else 0
    return {
        "memory_gib": memory / GIB,
        "matmul_tf": 2 * n**3 / matmul / 1e12,
        "memory_gbs": 2 * sizes.copy_bytes / moved / 1e9,
        "exchanges": exchanges,
        "latency_us": latency * 1e6,
    }


def _exchanges(runtime: Runtime, size: int) -> dict[Exchange, float]:
    """GB/s one rank sends; `size` bytes are whole on each rank afterwards."""
    ranks = runtime.world_size
    length = size // 4 // ranks * ranks
    whole = torch.zeros(length, device=runtime.device)
    part = torch.zeros(length // ranks, device=runtime.device)
    other = torch.zeros_like(whole)
    away = 4 * length * (ranks - 1) / ranks
    calls: dict[Exchange, tuple[float, Callable[[], object]]] = {
        "all_gather": (away, lambda: _all_gather(whole, part)),
        "all_reduce": (2 * away, lambda: dist.all_reduce(whole)),
        "all_to_all": (away, lambda: dist.all_to_all_single(other, whole)),
    }
    return {name: sent / _seconds(call, runtime) / 1e9 for name, (sent, call) in calls.items()}


def _seconds(call: Callable[[], object], runtime: Runtime) -> float:
    """Median seconds of a call on the slowest rank; the first one warms up."""
    taken = []
    for _ in range(_REPEATS + 1):
        _wait(runtime)
        begun = time.perf_counter()
        call()
        if runtime.device.type == "cuda":
            torch.cuda.synchronize(runtime.device)
        taken.append(time.perf_counter() - begun)
    slowest = torch.tensor(statistics.median(taken[1:]), device=runtime.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _wait(runtime: Runtime) -> None:
    """All ranks start together."""
    if runtime.world_size > 1:
        dist.barrier()
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)
