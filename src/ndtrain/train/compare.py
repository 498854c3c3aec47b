"""Two traces side by side: what differs, and by how much."""

import math
from dataclasses import dataclass

from ndtrain.train.cells import Trace

LOSS = 1e-5
"""Relative; as the tests of every mesh demand."""

GRAD_NORM = 1e-4
"""Relative."""

FLOAT8_LOSS = 1e-2
"""Relative, between 8-bit matmuls and bf16 ones."""

PARAMETER = 1e-4
"""Absolute, after the last step."""


@dataclass(frozen=True)
class StepPair:
    """One step of both traces."""

    step: int
    losses: tuple[float, float]
    grad_norms: tuple[float, float]

    @property
    def loss_difference(self) -> float:
        """Relative difference of the losses."""
        return relative(*self.losses)

    @property
    def norm_difference(self) -> float:
        """Relative difference of the gradient norms."""
        return relative(*self.grad_norms)


@dataclass(frozen=True)
class Comparison:
    """Everything that was compared.

    Attributes:
        parameter: name of the parameter that differs most.
        parameter_difference: its largest absolute difference.
        differences: what is beyond rounding, in words; empty when the traces agree.
    """

    steps: tuple[StepPair, ...]
    parameter: str
    parameter_difference: float
    differences: tuple[str, ...]

    def table(self) -> str:
        """A line for each step, the parameters and the verdict."""
        lines = [
            f"{'step':>4}  {'loss, mesh':>11}  {'loss, one':>11}  {'difference':>10}  "
            f"{'norm, mesh':>11}  {'norm, one':>11}  {'difference':>10}"
        ]
        for pair in self.steps:
            lines.append(
                f"{pair.step:>4}  {pair.losses[0]:>11.6f}  {pair.losses[1]:>11.6f}  "
                f"{pair.loss_difference:>10.1e}  {pair.grad_norms[0]:>11.6f}  "
                f"{pair.grad_norms[1]:>11.6f}  {pair.norm_difference:>10.1e}"
            )
        lines.append(
            f"parameters after step {len(self.steps)}: largest difference "
            f"{self.parameter_difference:.1e}, in {self.parameter}"
        )
        lines.append(
            f"allowed: loss {LOSS:.0e}, gradient norm {GRAD_NORM:.0e}, parameters {PARAMETER:.0e}"
        )
        lines.append("verdict: differs" if self.differences else "verdict: the same")
        return "\n".join(lines)


@dataclass(frozen=True)
class LossReport:
    """Losses of a run in 8-bit floats beside those of the same run in bf16."""

    steps: tuple[tuple[float, float], ...]

    @property
    def difference(self) -> float:
        """The largest relative difference of a step's losses; NaN when one is not a number."""
        found = [relative(*losses) for losses in self.steps]
        return next((one for one in found if math.isnan(one)), max(found))

    @property
    def passes(self) -> bool:
        """Whether the losses stay together."""
        return self.difference <= FLOAT8_LOSS

    def table(self) -> str:
        """A line for each step, and the verdict."""
        lines = [f"{'step':>4}  {'loss, fp8':>11}  {'loss, bf16':>11}  {'difference':>10}"]
        for step, (eight, sixteen) in enumerate(self.steps, start=1):
            lines.append(
                f"{step:>4}  {eight:>11.6f}  {sixteen:>11.6f}  {relative(eight, sixteen):>10.1e}"
            )
        verdict = "within it" if self.passes else "beyond it"
        lines.append(
            f"largest difference {self.difference:.1e}, allowed {FLOAT8_LOSS:.0e}: {verdict}"
        )
        return "\n".join(lines)


def relative(value: float, reference: float) -> float:
    """Difference as a share of the reference; NaN when either is not a number."""
    if value == reference:
        return 0.0
    return abs(value - reference) / max(abs(reference), 1e-12)


def compare_traces(trace: Trace, reference: Trace) -> Comparison:
    """Compare a mesh with one process, step by step.

    Args:
        trace: of the mesh.
        reference: of one process, over the same rows.
    """
    steps = tuple(
        StepPair(number, losses, norms)
        for number, (losses, norms) in enumerate(
            zip(
                zip(trace.losses, reference.losses, strict=True),
                zip(trace.grad_norms, reference.grad_norms, strict=True),
                strict=True,
            ),
            start=1,
        )
    )
    differences = []
    for pair in steps:
        # written so that NaN, which compares as false, counts as a difference
        if not pair.loss_difference <= LOSS:
            differences.append(f"loss of step {pair.step} by {pair.loss_difference:.1e}")
        if not pair.norm_difference <= GRAD_NORM:
            differences.append(f"gradient norm of step {pair.step} by {pair.norm_difference:.1e}")
    parameter, largest = _largest_difference(trace, reference)
    if not largest <= PARAMETER:
        differences.append(f"parameter {parameter} by {largest:.1e}")
    return Comparison(steps, parameter, largest, tuple(differences))


def _largest_difference(trace: Trace, reference: Trace) -> tuple[str, float]:
    """The parameter that differs most; one that a trace lacks differs without bound."""
    missing = trace.parameters.keys() ^ reference.parameters.keys()
    if missing:
        return min(missing), math.inf
    found = {
        name: (trace.parameters[name] - whole).abs().max().item() if whole.numel() else 0.0
        for name, whole in reference.parameters.items()
    }
    return max(found.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])
