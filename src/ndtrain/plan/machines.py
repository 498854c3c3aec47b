"""The machines of a plan: what the user named, else this machine, measured or by the book."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from ndtrain.plan.hardware import GIB, HOST, Cluster, Gpu, build_cluster, build_host, local_gpus
from ndtrain.plan.measured import read_measured, unknown_gpu, with_measured
from ndtrain.plan.plan import ranks_per_node
from ndtrain.recipe.schema import Recipe

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Machines:
    """What the user said of the machines.

    Attributes:
        found: GPUs of this machine, by their names in the hardware book.
    """

    world_size: int | None = None
    gpu: str | None = None
    nodes: int | None = None
    intra: str | None = None
    inter: str | None = None
    found: tuple[str, ...] = ()


def machines_here(
    world_size: int | None = None,
    gpu: str | None = None,
    nodes: int | None = None,
    intra: str | None = None,
    inter: str | None = None,
) -> Machines:
    """The user's options together with the GPUs of this machine."""
    return Machines(world_size, gpu, nodes, intra, inter, local_gpus())


def cluster_for(machines: Machines, recipe: Recipe, world_size: int) -> Cluster | None:
    """What `world_size` ranks of a recipe would have; None when nobody knows.

    A GPU that the user named has the rates of the hardware book. This machine's GPUs have those
    that were measured on it, where they were; a host counts only when it was measured.

    Raises:
        MeshError: the ranks cannot be dealt evenly to the nodes.
        RecipeError: an unknown part.
    """
    if machines.nodes is not None:
        ranks_per_node(world_size, machines.nodes)
    if machines.gpu is not None:
        return _build(machines, machines.gpu, world_size, machines.nodes)
    if recipe.device == "cpu":
        cluster = host_cluster(world_size, nodes=machines.nodes or 1)
        return None if cluster.rates == "guessed" else cluster
    if not machines.found:
        return None
    measured = read_measured(on_gpu=True, count=len(machines.found))
    known = next((name for name in machines.found if name != "unknown"), None)
    gpu = known or (unknown_gpu(measured) if measured else None)
    if gpu is None:
        return None
    nodes = machines.nodes or -(-world_size // len(machines.found))
    cluster = _build(machines, gpu, world_size, nodes)
    if measured is None:
        return cluster
    return with_measured(cluster, measured, keeps_link=machines.intra is not None)


def cluster_here(recipe: Recipe, world_size: int, *, nodes: int = 1) -> Cluster | None:
    """What the ranks of a run started here get: this machine's GPUs, or a share of the host.

    Args:
        world_size: ranks over all nodes.
        nodes: machines like this one.

    Returns:
        None where the machine has GPUs that neither the book nor a measurement knows.
    """
    machines = machines_here(nodes=nodes)
    if recipe.device == "cpu" or not machines.found:
        return host_cluster(world_size, nodes=nodes)
    return cluster_for(machines, recipe, world_size)


def host_cluster(world_size: int, *, nodes: int = 1) -> Cluster:
    """Ranks as processes of `nodes` hosts like this one, which share its memory evenly."""
    ranks = ranks_per_node(world_size, nodes)
    share = min(host_memory() / ranks, process_limit()) / GIB
    cluster = build_host(HOST, memory_gib=share, world_size=world_size, nodes=nodes)
    measured = read_measured(on_gpu=False, count=ranks)
    return cluster if measured is None else with_measured(cluster, measured)


def host_memory(limit_file: Path = _CGROUP_LIMIT) -> float:
    """Bytes of memory of this host, or of the control group this process is held in."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        return min(total, float(limit_file.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no control group, or the word `max`
        return total


def process_limit() -> float:
    """Bytes a process may hold by `ulimit -v`; infinite where there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return float("inf") if limit == resource.RLIM_INFINITY else float(limit)


def _build(machines: Machines, gpu: Gpu | str, world_size: int, nodes: int | None) -> Cluster:
    return build_cluster(
        gpu, world_size=world_size, nodes=nodes, intra=machines.intra, inter=machines.inter
    )
