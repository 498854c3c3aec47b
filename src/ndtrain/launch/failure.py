"""Failures as data: what went wrong on a rank, in a form that crosses processes.

A rank sends its failure to the launcher through a pipe, for a full disk is one of the failures;
the launcher picks the first real one and raises it again with the same exit code.
"""

import time
import traceback
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ndtrain.errors import (
    UNWRITABLE_DISK,
    CheckpointError,
    DataError,
    DivergedError,
    ExitCode,
    MeshError,
    NdtrainError,
    OutOfMemoryError,
    RecipeError,
)
from ndtrain.report.atomic import write_failure

Kind = Literal["error", "fault", "peer", "timeout"]

_TIMEOUT_WORDS = ("timed out", "timeout", "wait timeout")
_PEER_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connect failed",
    "remote process",
    "ncclremoteerror",
    "socket closed",
)
_MEMORY_WORDS = ("can't allocate memory", "cannot allocate memory", "out of memory")


@dataclass(frozen=True)
class Failure:
    """One rank's failure.

    Attributes:
        kind: "error" has a message for the user, "fault" is a defect, "peer" only says that
            another rank is gone, "timeout" that a collective did not finish.
        stage: what the rank was doing, with its step.
    """

    rank: int
    kind: Kind
    exit_code: int
    message: str
    where: str
    hint: str
    stage: str
    step: int
    traceback: str
    time: float

    @property
    def is_first_hand(self) -> bool:
        """Whether the cause lies in this rank, as far as it can tell."""
        return self.kind in ("error", "fault")


def describe_failure(
    error: BaseException, *, rank: int = 0, stage: str = "", step: int = 0
) -> Failure:
    """What `error` means for the user and for the exit code."""
    kind, code, message, where, hint = _classify(error)
    return Failure(
        rank=rank,
        kind=kind,
        exit_code=int(code),
        message=message,
        where=where,
        hint=hint,
        stage=stage,
        step=step,
        traceback="".join(traceback.format_exception(error)),
        time=time.time(),
    )


def _classify(error: BaseException) -> tuple[Kind, ExitCode, str, str, str]:
    if isinstance(error, NdtrainError):
        kind = _kind_of_cause(error.__cause__)
        return kind or "error", error.exit_code, error.message, error.where, error.hint
    if isinstance(error, KeyboardInterrupt):
        return "error", ExitCode.SIGINT, "Interrupted.", "", ""
    first_line = str(error).strip().split("\n")[0]
    if is_out_of_memory(error):
        return "error", ExitCode.MEMORY, f"Out of memory: {first_line}", "", MEMORY_HINT
    if isinstance(error, OSError) and error.errno in UNWRITABLE_DISK:
        return _classify(write_failure(str(error.filename or ""), error))
    if isinstance(error, (RuntimeError, ConnectionError, TimeoutError)) and (
        kind := _kind_of_text(str(error))
    ):
        words = "A collective did not finish" if kind == "timeout" else "Another rank is gone"
        return kind, ExitCode.MESH, f"{words}: {first_line}", "", ""
    if isinstance(error, dist.DistError):
        return "peer", ExitCode.MESH, f"A collective failed: {first_line}", "", ""
    return "fault", ExitCode.FAULT, f"{type(error).__name__}: {first_line}", "", ""


MEMORY_HINT = (
    "Lower micro_batch_size or sequence_len, set gradient_checkpointing: true, or shard over "
    "more ranks; `ndtrain plan` shows what fits."
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _MEMORY_WORDS)


def _kind_of_cause(cause: BaseException | None) -> Kind | None:
    """Whether an error with a message for the user is only the echo of a lost rank.

    A save in the background, say, breaks off when a rank is killed, and is not the cause.
    """
    while cause is not None:
        if isinstance(cause, (RuntimeError, CheckpointException)) and not isinstance(
            cause, torch.OutOfMemoryError
        ):
            return _kind_of_text(str(cause))
        cause = cause.__cause__
    return None


def _kind_of_text(text: str) -> Kind | None:
    lowered = text.lower()
    if any(words in lowered for words in _PEER_WORDS):
        return "peer"
    if any(words in lowered for words in _TIMEOUT_WORDS):
        return "timeout"
    return None


_ERROR_OF = {
    ExitCode.RECIPE: RecipeError,
    ExitCode.MESH: MeshError,
    ExitCode.DATA: DataError,
    ExitCode.CHECKPOINT: CheckpointError,
    ExitCode.MEMORY: OutOfMemoryError,
    ExitCode.DIVERGED: DivergedError,
}


def error_of(failure: Failure) -> NdtrainError:
    """The exception that carries `failure` on, with its exit code."""
    return error_for_code(
        failure.exit_code, failure.message, where=failure.where, hint=failure.hint
    )


def error_for_code(exit_code: int, message: str, *, where: str, hint: str) -> NdtrainError:
    """The exception type that stands for an exit code."""
    try:
        error_type = _ERROR_OF.get(ExitCode(exit_code), NdtrainError)
    except ValueError:
        error_type = NdtrainError
    return error_type(message, where=where, hint=hint)
