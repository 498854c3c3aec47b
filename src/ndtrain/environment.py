"""What the process inherits from outside: launcher variables, NO_COLOR, `${VAR}` in paths.

The only module that touches `os.environ`; everything else receives values as arguments.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ndtrain.errors import MeshError

Launcher = Literal["ndtrain", "torchrun", "accelerate", "srun"]

_IGNORED_PREFIXES = ("ACCELERATE_", "FSDP_")


@dataclass(frozen=True)
class LaunchedRank:
    """The place a launcher gave this process.

    Attributes:
        rank: number among all processes of the run.
        local_rank: number among the processes of this host.
        run_id: the launcher's name for the job, the same on every rank.
        attempt: how often the launcher has restarted the whole set (0 = first start).
        address: host of the store over which the ranks meet.
        port: its port.
        hosts_store: whether the launcher holds the store; else rank 0 does.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    run_id: str
    launcher: Launcher
    attempt: int = 0
    address: str = "127.0.0.1"
    port: int = 29500
    hosts_store: bool = False


def lookup(name: str) -> str | None:
    """The value of an environment variable, None when it is not set."""
    return os.environ.get(name)


def sets_malloc() -> bool:
    """Whether the user has settings of their own for the C library's malloc."""
    return any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)


def no_color() -> bool:
    """Whether the user asked for output without colours (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def cache_dir() -> Path:
    """Where prepared data and converted weights are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ndtrain"


def launched_rank() -> LaunchedRank | None:
    """The rank that torchrun, `accelerate launch` or srun gave this process, None without one.

    Raises:
        MeshError: a launcher's variables are incomplete or not numbers.
    """
    return read_launched_rank(os.environ)


def read_launched_rank(environ: Mapping[str, str]) -> LaunchedRank | None:
    """The same from a mapping of variables."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _from_torch_variables(environ)
    if "SLURM_PROCID" in environ and _number(environ, "SLURM_NTASKS", 1) > 1:
        return _from_slurm(environ)
    return None


def ignored_variables() -> tuple[str, ...]:
    """Names of inherited ACCELERATE_* and FSDP_* variables; the recipe alone decides the mesh."""
    launched = launched_rank()
    # `accelerate launch` sets its own for every process it starts: no news to the user.
    if launched is not None and launched.launcher == "accelerate":
        return ()
    return tuple(sorted(name for name in os.environ if name.startswith(_IGNORED_PREFIXES)))


def ignored_variables_notice() -> str | None:
    """One line that names inherited variables of other tools, None when there are none."""
    names = ignored_variables()
    if not names:
        return None
    return f"Ignoring {', '.join(names)} from the environment: the recipe decides the mesh."


def export_rank(rank: LaunchedRank, *, threads: int | None, interface: str | None) -> None:
    """Set the variables under which libraries look for their rank, in this process.

    Args:
        threads: CPU threads a rank may use, None to leave the setting as it is.
        interface: network interface for gloo, unless the user chose one.
    """
    os.environ.update(
        RANK=str(rank.rank),
        WORLD_SIZE=str(rank.world_size),
        LOCAL_RANK=str(rank.local_rank),
        LOCAL_WORLD_SIZE=str(rank.local_world_size),
        MASTER_ADDR=rank.address,
        MASTER_PORT=str(rank.port),
    )
    # A tokenizer that has run threads in the parent would warn about every fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def quiet_profiler() -> None:
    """Keep torch's profiler from writing between the lines of a run; only before its first use."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def _from_torch_variables(environ: Mapping[str, str]) -> LaunchedRank:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise MeshError(
            f"RANK is '{rank}', but WORLD_SIZE is '{world_size}'.",
            where="environment",
            hint="Start through one launcher only, or unset both variables.",
        )
    accelerated = any(name.startswith("ACCELERATE_") for name in environ)
    return LaunchedRank(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", rank),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", world_size),
        run_id=environ.get("TORCHELASTIC_RUN_ID", "none"),
        launcher="accelerate" if accelerated else "torchrun",
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        address=environ.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(environ, "MASTER_PORT", 29500),
        hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_slurm(environ: Mapping[str, str]) -> LaunchedRank:
    """A rank of an srun step; the first host of the step holds the store."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    job = environ.get("SLURM_JOB_ID", "0")
    return LaunchedRank(
        rank=_number(environ, "SLURM_PROCID"),
        world_size=_number(environ, "SLURM_NTASKS"),
        local_rank=_number(environ, "SLURM_LOCALID", 0),
        local_world_size=_tasks_of_node(environ),
        run_id=f"slurm-{job}",
        launcher="srun",
        attempt=_number(environ, "SLURM_RESTART_COUNT", 0),
        address=environ.get("MASTER_ADDR") or first_host(nodes) or "127.0.0.1",
        port=_number(environ, "MASTER_PORT", 20000 + _digits(job) % 20000),
    )


def _tasks_of_node(environ: Mapping[str, str]) -> int:
    """`SLURM_STEP_TASKS_PER_NODE` reads like `4(x2),3`: the entry of this node."""
    node = _number(environ, "SLURM_NODEID", 0)
    counts: list[int] = []
    for tasks, repeat in re.findall(
        r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    ):
        counts += [int(tasks)] * int(repeat or 1)
    return counts[node] if node < len(counts) else 1


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[03-07,9],x1` gives `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    if not match:
        return ""
    prefix, number, suffix = match.groups()
    return f"{prefix}{number or ''}{suffix or ''}"


def _digits(text: str) -> int:
    return int("".join(char for char in text if char.isdigit()) or 0)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise MeshError(
            f"{name} is '{text or ''}', which is not a number.",
            where="environment",
            hint="Start through torchrun, srun or ndtrain itself, which set it.",
        ) from None
