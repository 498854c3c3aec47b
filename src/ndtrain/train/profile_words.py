"""`profile.txt`: where the profiled steps went, in words, and their longest kernels."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ndtrain.train.step_account import RANKS, StepAccount

_LONGEST = 40


@dataclass(frozen=True)
class Timed:
    """One call of a kernel or an operator.

    Attributes:
        own: microseconds, without those of operators that it called.
    """

    name: str
    kind: str
    own: float


def steps_words(first: int, last: int, seconds: float) -> str:
    """`Steps 10 to 12, 557.2 ms each`."""
    each = f"{seconds * 1000:.1f} ms"
    return f"Step {first}, {each}" if first == last else f"Steps {first} to {last}, {each} each"


def device_lines(account: StepAccount, steps: int, *, alone: bool) -> Iterator[str]:
    """A line a kind of moment, and how much exchange was hidden.

    Args:
        steps: in the account.
        alone: there are no other ranks to wait for.
    """
    for kind, share in account.shares.items():
        if kind != RANKS or share or not alone:
            yield _kind_line(kind, account.times[kind] / steps, share)
    if account.communication:
        total, hidden = (
            f"{time / steps / 1000:.1f} ms"
            for time in (account.communication, account.hidden_communication)
        )
        yield f"Ranks exchange for {total} a step, {hidden} of it beside other kernels."


def operator_lines(times: Mapping[str, float], steps: int, data_wait: float) -> Iterator[str]:
    """A line a kind of operator, for a host that computes itself.

    Args:
        times: microseconds over all steps, by kind.
        data_wait: share of the steps in which the loop waited for its next batch.
    """
    total = sum(times.values())
    yield f"waiting for data: {100 * data_wait:.1f} % of these steps"
    yield f"The operators themselves take {total / steps / 1000:.1f} ms a step:"
    for kind, time in times.items():
        yield _kind_line(kind, time / steps, time / (total or 1.0))


def _kind_line(kind: str, microseconds: float, share: float) -> str:
    return f"{kind:23} {microseconds / 1000:9.2f} ms {100 * share:6.1f} %"


def rate_line(work: float | None, matmul: float | None) -> str:
    """The model's work beside what the card was measured to reach, both in TFLOP/s."""
    done = "The model's work is not known"
    if work is not None:
        done = f"{work:.0f} TFLOP/s of model work a device"
    if matmul is None:
        return f"{done}; the card had no room to time a matrix product beside the run."
    if work is None:
        return f"{done}; one large bf16 matrix product reaches {matmul:.0f} TFLOP/s on this card."
    share = f"{100 * work / matmul:.0f} % of the {matmul:.0f}"
    return f"{done}: {share} that one large bf16 matrix product reaches on this card."


def sums_by_kind(calls: Iterable[Timed]) -> dict[str, float]:
    """Microseconds of each kind, the longest first."""
    sums: dict[str, float] = defaultdict(float)
    for call in calls:
        sums[call.kind] += call.own
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def longest_lines(calls: Sequence[Timed], steps: int) -> Iterator[str]:
    """A table of the kernels that take longest, with their kinds."""
    times: dict[tuple[str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for call in calls:
        times[call.name, call.kind] += call.own
        counts[call.name, call.kind] += 1
    yield "    ms/step  calls/step  kind            kernel"
    for key, time in sorted(times.items(), key=lambda item: -item[1])[:_LONGEST]:
        name, kind = key
        each = f"{time / steps / 1000:11.2f} {counts[key] / steps:11.1f}"
        yield f"{each}  {kind:14}  {name[:90]}"
