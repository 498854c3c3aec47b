"""Starting the ranks of a run and answering for how they end.

`launch` is the one entry: in-process for a single rank or inside torchrun, srun and
`accelerate launch`; otherwise it starts the ranks itself and supervises them.
"""

from collections.abc import Callable
from typing import TypeVar

from ndtrain import environment
from ndtrain.environment import LaunchedRank
from ndtrain.errors import MeshError
from ndtrain.launch.options import LaunchOptions

__all__ = ["LaunchOptions", "launch"]

JobT = TypeVar("JobT")


def launch(
    job: JobT,
    run_rank: Callable[[JobT, LaunchedRank | None], int],
    options: LaunchOptions,
) -> int:
    """Run `run_rank(job, rank)` on every rank of the mesh and return the run's exit code.

    Args:
        job: handed to every rank unchanged; picklable.
        run_rank: a module-level function, which returns an exit code.

    Raises:
        NdtrainError: the first real failure of any rank, with its exit code.
    """
    launched = environment.launched_rank()
    if launched is not None:
        check_world_size(launched, options.world_size)
        return run_rank(job, launched)
    if options.world_size == 1 and options.max_restarts == 0:
        return run_rank(job, None)
    # Imported here: a single process needs none of it.
    from ndtrain.launch.supervisor import supervise

    return supervise(job, run_rank, options)


def check_world_size(launched: LaunchedRank, planned: int) -> None:
    """Refuse a launcher that started another number of ranks than the mesh has.

    Raises:
        MeshError: naming both numbers and every way out.
    """
    if launched.world_size != planned:
        raise MeshError(
            f"The recipe's mesh has {planned} rank{'s' if planned > 1 else ''}, but "
            f"{launched.launcher} started {launched.world_size}.",
            where="environment: WORLD_SIZE",
            hint=f"Start {planned} ranks, change the axis sizes so that their product is "
            f"{launched.world_size}, or run `ndtrain train` alone, which starts them itself.",
        )
