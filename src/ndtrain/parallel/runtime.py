"""One process of a run: its rank, its device and its process group."""

import datetime
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # re-exported from C++
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    distributed_c10d,
)

from ndtrain import environment
from ndtrain.environment import LaunchedRank
from ndtrain.errors import MeshError
from ndtrain.parallel.host_memory import keep_freed_memory


@dataclass(frozen=True)
class Runtime:
    """This process's place in the run.

    Attributes:
        rank: number among all processes, 0 is the main rank.
        local_rank: number among the processes of this host.
        attempt: how often the launcher has restarted the whole set.
        timeout_seconds: after which a collective counts as hanging.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    attempt: int = 0
    timeout_seconds: float = 1800

    @property
    def timeout(self) -> datetime.timedelta:
        """The timeout as torch wants it."""
        return datetime.timedelta(seconds=self.timeout_seconds)

    @property
    def is_main(self) -> bool:
        """Whether this rank reports and writes what is written once."""
        return self.rank == 0


def start(
    launched: LaunchedRank | None,
    *,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    timeout_seconds: float = 1800,
) -> Runtime:
    """Choose the device and join the process group; a single process gets a group of its own.

    A group of size one lets every mesh, sharding and checkpoint call run unchanged without a
    launcher.

    Raises:
        MeshError: CUDA was asked for and is missing, or the ranks do not find each other.
    """
    chosen = _choose_device(device, launched.local_rank if launched else 0)
    backend = "cuda:nccl,cpu:gloo" if chosen.type == "cuda" else "gloo"
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        _let_memory_grow()
    else:
        keep_freed_memory()
    timeout = datetime.timedelta(seconds=timeout_seconds)
    rank, world_size = (launched.rank, launched.world_size) if launched else (0, 1)
    try:
        dist.init_process_group(
            backend,
            store=_store(launched, timeout),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            # Binding the device early lets NCCL connect at once and barrier on the right GPU.
            device_id=chosen if chosen.type == "cuda" else None,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        place = f"{launched.address}:{launched.port}" if launched else "one process"
        raise MeshError(
            f"The {world_size} ranks did not find each other: {error}",
            where=place,
            hint="Check that every node can reach this address and that all ranks were started.",
        ) from error
    return Runtime(
        rank=rank,
        world_size=world_size,
        local_rank=launched.local_rank if launched else 0,
        device=chosen,
        attempt=launched.attempt if launched else 0,
        timeout_seconds=timeout_seconds,
    )


def limit_waits(runtime: Runtime) -> None:
    """Give every process group the run's timeout; those of a device mesh start with torch's own.

    Without it a rank that stands still would hold the others for half an hour whenever they
    happen to wait on such a group.
    """
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(runtime.timeout, group)


def stop(runtime: Runtime, *, failed: bool = False) -> None:
    """Leave the process group; after a failure without waiting for ranks that may be gone."""
    if not dist.is_initialized() or (failed and runtime.world_size > 1):
        return
    if runtime.world_size > 1:
        # Whoever holds the store must not leave before the last rank is done with it.
        dist.barrier()
    dist.destroy_process_group()


def _store(launched: LaunchedRank | None, timeout: datetime.timedelta) -> Store:
    """The store over which the ranks exchange their addresses, one space for each attempt.

    torchrun keeps its store over restarts; without a space of its own, a restarted rank would
    now and then find the address of a dead one there and wait for it.
    """
    if launched is None:
        return HashStore()
    store: Store = TCPStore(
        launched.address,
        launched.port,
        launched.world_size,
        is_master=launched.rank == 0 and not launched.hosts_store,
        timeout=timeout,
        wait_for_workers=not launched.hosts_store,
    )
    return PrefixStore(f"attempt-{launched.attempt}", store)


def _let_memory_grow() -> None:
    """Let freed device memory be used for tensors of other sizes, unless the user has settings.

    Blocks of fixed size leave gaps between activations, optimizer states and loss chunks.
    """
    if not any(map(environment.lookup, ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _choose_device(word: Literal["auto", "cuda", "cpu"], local_rank: int) -> torch.device:
    if word == "cpu":
        return torch.device("cpu")
    # Asks the driver's library first, so that a parent which still forks stays clean.
    count = torch.cuda.device_count()
    if count > local_rank:
        return torch.device("cuda", local_rank)
    if word == "cuda" or count:
        raise MeshError(
            f"Local rank {local_rank} needs a GPU of its own, but {count} are visible.",
            where="device",
            hint="Use smaller mesh sizes, start fewer ranks a node, or set device: cpu.",
        )
    return torch.device("cpu")
