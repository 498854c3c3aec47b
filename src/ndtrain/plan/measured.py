"""A machine's own rates, measured once and kept in the user's cache.

`ndtrain plan --measure` writes them (`ndtrain.train.measure` has the probes); everything that plans
for this machine reads them, without torch. The key is what the rates hang on: the device, how many
of them, and the version of torch.
"""

import json
import re
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ndtrain.environment import cache_dir
from ndtrain.errors import CheckpointError
from ndtrain.plan.hardware import HOST, Cluster, Exchange, Gpu, Link, gpu_models, probe_shares
from ndtrain.recipe.unwritable import advise_unwritable

FORMAT_VERSION = 1
_CPUINFO = Path("/proc/cpuinfo")
SOURCE = "measured on this machine"


@dataclass(frozen=True)
class MeasuredMachine:
    """What the probes read.

    Attributes:
        device: the driver's name of the GPU, or the processor's.
        count: ranks that measured together, one a GPU or process.
        memory_gib: of a GPU; 0 on a host, which is asked each time.
        matmul_tf: TFLOP/s of one rank in a large matrix product, all ranks at it.
        memory_gbs: GB/s that one rank reads and writes, all ranks at it.
        exchanges: GB/s that one rank sends; empty for a single rank.
        latency_us: of an exchange of a few bytes.
        date: when, as YYYY-MM-DD.
    """

    device: str
    count: int
    torch: str
    on_gpu: bool
    memory_gib: float
    matmul_tf: float
    memory_gbs: float
    exchanges: dict[Exchange, float]
    latency_us: float
    date: str

    def describe(self) -> str:
        """The rates in one line."""
        speeds = ", ".join(
            f"{name.replace('_', '-')} {gbs:.3g} GB/s" for name, gbs in self.exchanges.items()
        )
        return (
            f"{self.count} × {self.device}, torch {self.torch}: matrix products "
            f"{self.matmul_tf:.3g} TFLOP/s, memory {self.memory_gbs:.3g} GB/s"
            f"{', ' if speeds else ''}{speeds}"
        )


def machine_path(device: str, count: int, torch: str) -> Path:
    """Where the rates of a machine are kept."""
    name = re.sub(r"[^A-Za-z0-9.+]+", "-", f"{device} x{count} torch {torch}").strip("-")
    return cache_dir() / "machines" / f"{name}.json"


def write_measured(machine: MeasuredMachine) -> Path:
    """Keep the rates; returns where.

    Raises:
        CheckpointError: the cache cannot be written.
    """
    path = machine_path(machine.device, machine.count, machine.torch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps({"v": FORMAT_VERSION, **asdict(machine)}, indent=2) + "\n")
        unfinished.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot be written: {error.strerror}.",
            where=str(path),
            hint=advise_unwritable(path, error, "set XDG_CACHE_HOME to another folder"),
        ) from error
    return path


def read_measured(*, on_gpu: bool, count: int) -> MeasuredMachine | None:
    """This machine's rates for `count` ranks, None where nobody has measured them."""
    if not (cache_dir() / "machines").is_dir():
        return None
    try:
        path = machine_path(device_name(on_gpu=on_gpu), count, version("torch"))
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("v") != FORMAT_VERSION:
            return None
        return MeasuredMachine(**content)
    except (OSError, ValueError, TypeError, KeyError, PackageNotFoundError):
        # an unreadable measurement is none: the hardware book is there
        return None


def device_name(*, on_gpu: bool) -> str:
    """What this machine's first GPU, or its processor, is called."""
    if on_gpu:
        return next(iter(gpu_models()), "") or "unknown GPU"
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return HOST
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else HOST


def with_measured(
    cluster: Cluster, machine: MeasuredMachine, *, keeps_link: bool = False
) -> Cluster:
    """The cluster with this machine's rates inside a node; between nodes the book's stay.

    Args:
        keeps_link: the user has named the link inside a node.
    """
    shares = probe_shares()
    gpu = replace(
        cluster.gpu,
        memory_gib=machine.memory_gib or cluster.gpu.memory_gib,
        bf16_tf=machine.matmul_tf / shares["matmul"],
        memory_gbs=machine.memory_gbs / shares["memory"],
        source=SOURCE,
        date=machine.date,
    )
    intra = cluster.intra
    if machine.exchanges and not keeps_link:
        intra = Link(
            name="measured",
            gbs=machine.exchanges["all_gather"],
            latency_us=machine.latency_us,
            source=SOURCE,
            date=machine.date,
            measured=machine.exchanges,
        )
    return replace(cluster, gpu=gpu, intra=intra, rates="measured")


def unknown_gpu(machine: MeasuredMachine) -> Gpu:
    """A GPU that the book lacks, as far as it was measured; `with_measured` adds the rates."""
    return Gpu(
        name=machine.device,
        memory_gib=machine.memory_gib,
        bf16_tf=machine.matmul_tf,
        fp8_tf=None,
        memory_gbs=machine.memory_gbs,
        link="pcie4",
        source=SOURCE,
        date=machine.date,
    )
