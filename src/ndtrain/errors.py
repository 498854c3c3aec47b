"""Every failure a user can cause or meet, as one exception type per exit code.

An error carries what went wrong, where (a `file:line:col`, a `--set key`, a path) and what to
do about it. The command line turns it into one message and the exit code; a traceback is shown
only with `--debug`.
"""

import errno
from enum import IntEnum
from typing import Any

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""System errors of a disk, or of a user's share of it, that is full."""
UNWRITABLE_DISK = (*NO_SPACE, errno.EROFS)
"""Those, and the one of a disk that can only be read."""


class ExitCode(IntEnum):
    """The process exit codes users and schedulers rely on."""

    OK = 0
    FAULT = 1
    RECIPE = 2
    MESH = 3
    DATA = 4
    CHECKPOINT = 5
    MEMORY = 6
    DIVERGED = 7
    SIGINT = 130
    SIGTERM = 143


class NdtrainError(Exception):
    """A failure with a message for the user: what, where and what to do.

    Args:
        message: what is wrong, in one sentence, with the offending value in quotes.
        where: `file:line:col`, `--set key` or a path; empty when there is no place to name.
        hint: what to do about it; empty when the message says it already.
    """

    exit_code = ExitCode.FAULT

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message, where, hint)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        head = f"{self.where}: {self.message}" if self.where else self.message
        return f"{head} {self.hint}" if self.hint else head

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders; the default would hand message, where and hint over by
        # position.
        return _restore, (type(self), self.message, self.where, self.hint)


class RecipeError(NdtrainError):
    """The recipe or the command line is wrong, or a dataset file it names does not exist."""

    exit_code = ExitCode.RECIPE


class MeshError(NdtrainError):
    """The mesh, the environment or the model does not work: sizes, launcher, missing model."""

    exit_code = ExitCode.MESH


class DataError(NdtrainError):
    """A row cannot be read or used, or nothing is left to train on."""

    exit_code = ExitCode.DATA


class CheckpointError(NdtrainError):
    """Saving, loading or the disk failed."""

    exit_code = ExitCode.CHECKPOINT


class OutOfMemoryError(NdtrainError):
    """The device or the host ran out of memory."""

    exit_code = ExitCode.MEMORY


class DivergedError(NdtrainError):
    """The loss or a gradient is not finite."""

    exit_code = ExitCode.DIVERGED


class Problems(NdtrainError):
    """Several problems of one input, reported together, one a line.

    Args:
        problems: the single errors, already in the order in which they should be shown.
    """

    exit_code = ExitCode.RECIPE

    def __init__(self, problems: list[NdtrainError]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        return Problems, (self.problems,)


def _restore(kind: type[NdtrainError], message: str, where: str, hint: str) -> NdtrainError:
    """An error again, after it came from another process."""
    return kind(message, where=where, hint=hint)
