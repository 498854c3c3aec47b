"""A run that is out of memory: what was planned, and what of the recipe to change."""

import re

from ndtrain.errors import OutOfMemoryError
from ndtrain.launch.failure import MEMORY_HINT, is_out_of_memory
from ndtrain.launch.status import RunStatus
from ndtrain.plan.hardware import GIB
from ndtrain.plan.out_of_memory import explain_out_of_memory
from ndtrain.train.job import Job

_ASKED_FOR = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMG]iB)", re.IGNORECASE)


def explain_rank(job: Job, rank: int, status: RunStatus, error: BaseException) -> BaseException:
    """The error a rank ends with: `error` itself, explained where memory ran out.

    Args:
        status: what the rank was doing.
    """
    if not is_out_of_memory(error):
        return error
    where = f"rank {rank}, {status.stage}, step {status.step}"
    return _explain(job, where, cause=_asked_for(error))


def explain_launch(job: Job, error: OutOfMemoryError) -> OutOfMemoryError:
    """The error of a run, explained where no rank lived to do it: the kernel had killed it.

    What a GPU was planned to hold says nothing of a host that ran out of memory beside it.
    """
    on_gpu = job.prediction is not None and job.prediction.cluster.has_gpus
    if error.hint != MEMORY_HINT or on_gpu:
        return error
    return _explain(job, error.where, cause=error.message.rstrip("."))


def _explain(job: Job, where: str, cause: str) -> OutOfMemoryError:
    planned = job.prediction
    if planned is None:
        return OutOfMemoryError(f"out of memory: {cause}.", where=where, hint=MEMORY_HINT)
    return explain_out_of_memory(
        job.recipe,
        planned.facts,
        planned.setting,
        planned.cluster,
        planned.constants,
        where=where,
        cause=cause,
    )


def _asked_for(error: BaseException) -> str:
    """What the allocator could not give; torch's advice on its own settings is left out."""
    if match := _ASKED_FOR.search(str(error)):
        amount, unit = match.groups()
        if unit == "bytes":
            amount, unit = f"{float(amount) / GIB:.2f}", "GiB"
        return f"it tried to allocate {amount} {unit}"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
