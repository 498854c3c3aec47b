"""What happens in a run, as frozen records; reporters turn them into lines, files and pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

OVER = ("finished", "early_stopping")
"""Reasons of an end after which there is nothing left to train."""


@dataclass(frozen=True)
class RunStarted:
    """Training is about to take its first step of this process.

    Attributes:
        num_parameters: of the whole model, its adapters among them.
        adapted: kinds of modules that have an adapter.
        changed: by key, the value `before` and `after`, of what changes the result and is another
            than in the checkpoint that this start continues.
    """

    event: ClassVar[str] = "start"
    run_dir: str
    start_step: int
    total_steps: int
    steps_per_epoch: int
    mesh: Mapping[str, int]
    device: str
    num_parameters: int
    num_trainable: int
    adapted: Sequence[str] = field(default_factory=list)
    changed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class StepDone:
    """One optimizer step; `loss` is the mean over all trained tokens of the step, everywhere."""

    event: ClassVar[str] = "step"
    step: int
    epoch: float
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seen_tokens: int
    step_seconds: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    tflops_per_device: float | None
    mfu: float | None
    memory_gib: float


@dataclass(frozen=True)
class EvalDone:
    """One evaluation over all held-out rows."""

    event: ClassVar[str] = "eval"
    step: int
    loss: float
    tokens: int
    by_dataset: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplesDone:
    """Answers to the recipe's sample prompts."""

    event: ClassVar[str] = "samples"
    step: int
    answers: Mapping[str, str]


@dataclass(frozen=True)
class CheckpointSaved:
    """A complete checkpoint; `blocked_seconds` is how long training waited for it."""

    event: ClassVar[str] = "checkpoint"
    step: int
    path: str
    seconds: float
    blocked_seconds: float


@dataclass(frozen=True)
class ProfileDone:
    """Where the profiled steps went; `step` is the last of them.

    Attributes:
        step_seconds: mean of these steps.
        device: whose time is told: `cuda`, every moment of it, or `cpu`, that of its operators.
        shares: by kind, in the order in which they are told; together one.
        data_wait: share of the steps in which the loop waited for its next batch, also while the
            device was busy.
        hidden_communication: share of the steps in which ranks exchanged beside other kernels.
        matmul_tflops: of one large bf16 product on this card, None where it was not timed.
        files: names in the run directory.
    """

    event: ClassVar[str] = "profile"
    step: int
    first_step: int
    step_seconds: float
    device: str
    shares: Mapping[str, float]
    data_wait: float
    hidden_communication: float
    tflops_per_device: float | None
    matmul_tflops: float | None
    files: Sequence[str]


@dataclass(frozen=True)
class Notice:
    """Something the user should know that is not an error."""

    event: ClassVar[str] = "notice"
    text: str


@dataclass(frozen=True)
class RunEnded:
    """The end of this process's work: finished, max_steps, max_time, signal, early_stopping, ..."""

    event: ClassVar[str] = "end"
    reason: str
    step: int
    exit_code: int


Event = (
    RunStarted
    | StepDone
    | EvalDone
    | SamplesDone
    | CheckpointSaved
    | ProfileDone
    | Notice
    | RunEnded
)


class Reporter(Protocol):
    """Receives every event of a run on the main rank."""

    def write(self, event: Event) -> None:
        """Take note of one event."""

    def close(self) -> None:
        """Flush and release what is held."""
