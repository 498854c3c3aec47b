"""How near predictions come to measured runs: each run, and each run left out of the fit.

python benchmarks/plan_accuracy.py          table of the errors
python benchmarks/plan_accuracy.py --fit    also print constants fitted anew, for the hardware book

The constants are fitted to all runs at once by least squares of relative errors, held near what
is known of them otherwise (PRIORS: value, spread). Leaving a run out shows what the prediction of
it would be, had it never been measured.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from ndtrain.plan.accuracy import MeasuredRun, ordered_alike, predict, read_runs
from ndtrain.plan.calibration import Calibration
from ndtrain.plan.hardware import calibration

DATA = Path(__file__).resolve().parent.parent / "tests/unit/plan/data"
RUNS, PUBLISHED = DATA / "measured_runs.yaml", DATA / "published_runs.yaml"
ERROR = 0.02
"""Relative error of a run that weighs as much as one spread of a constant."""
MEMORY_PRIORS: Mapping[str, tuple[float, float]] = {
    "kept": (1.15, 0.2),
    "kept_budget": (1.08, 0.2),
    "workspace": (0.5, 0.5),
    "logit_bytes_eager": (12, 2),
    "base_gib": (0.5, 0.7),
    "fragmentation": (0.02, 0.02),
}
TIME_PRIORS: Mapping[str, tuple[float, float]] = {
    "matmul": (0.703, 0.02),
    "attention": (0.424, 0.02),
    "attention_narrow_head": (0.306, 0.02),
    "attention_varlen": (0.42, 0.1),
    "narrow_matmul": (0.1, 0.2),
    "elementwise": (8, 2),
    "loss_eager": (92, 10),
    "loss_compiled": (12, 4),
    "state": (60, 16),
    "cast": (36, 18),
    "gather_copies": (8, 4),
    "reduce_copies": (5, 4),
    "lora": (1, 0.6),
    "lora_shared": (0.7, 0.4),
}
Error = Callable[[MeasuredRun, Calibration], float]


def memory_error(run: MeasuredRun, constants: Calibration) -> float:
    return predict(run, constants).memory_error


def time_error(run: MeasuredRun, constants: Calibration) -> float:
    return predict(run, constants).time_error


def fit(
    runs: Sequence[MeasuredRun],
    start: Calibration,
    priors: Mapping[str, tuple[float, float]],
    error: Error,
) -> Calibration:
    """Gauss-Newton steps on the errors of all runs and the distance to the priors."""
    names = list(priors)
    prior = np.array([priors[name][0] for name in names])
    spread = np.array([priors[name][1] for name in names])

    def constants(values: np.ndarray) -> Calibration:
        return replace(start, **dict(zip(names, map(float, values), strict=True)))

    def residuals(values: np.ndarray) -> np.ndarray:
        held = constants(values)
        errors = [error(run, held) / ERROR for run in runs]
        return np.concatenate([errors, (values - prior) / spread])

    values = prior.copy()
    for _ in range(12):
        now = residuals(values)
        steps = 1e-4 * spread
        columns = [
            (residuals(values + step * unit) - now) / step
            for step, unit in zip(steps, np.eye(len(values)), strict=True)
        ]
        change, *_ = np.linalg.lstsq(np.stack(columns, 1), -now, rcond=None)
        values = np.maximum(values + change, 1e-3 * np.abs(prior))
    return constants(values)


def fit_all(runs: Sequence[MeasuredRun]) -> Calibration:
    """All constants fitted to the runs."""
    start = calibration()
    start = fit(runs, start, MEMORY_PRIORS, memory_error)
    return fit(runs, start, TIME_PRIORS, time_error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="print constants fitted anew")
    arguments = parser.parse_args()
    runs = read_runs(RUNS)
    held = calibration()
    print(
        f"{'run':62} {'GiB':>6} {'error':>7} {'left out':>8}   {'tok/s':>7} {'error':>7} left out"
    )
    worst = [0.0] * 4
    tables: dict[str, list] = {}
    for number, run in enumerate(runs):
        found = predict(run, held)
        apart = predict(run, fit_all([*runs[:number], *runs[number + 1 :]]))
        errors = [
            found.memory_error,
            apart.memory_error,
            found.time_error,
            apart.time_error,
        ]
        worst = [max(old, abs(new)) for old, new in zip(worst, errors, strict=True)]
        tables.setdefault(run.table, []).append(found)
        print(
            f"{run.label:62} {run.memory_gib:6.1f} {errors[0]:+7.1%} {errors[1]:+8.1%}   "
            f"{run.tokens_per_second:7,.0f} {errors[2]:+7.1%} {errors[3]:+8.1%}"
        )
    print(
        f"{'largest':62} {'':6} {worst[0]:7.1%} {worst[1]:8.1%}   {'':7} {worst[2]:7.1%} "
        f"{worst[3]:8.1%}"
    )
    for table, found in tables.items():
        print(f"order as measured, {table}: {'yes' if ordered_alike(found) else 'NO'}")
    print("\npublished steps of other engines; of the constants only tp_matmul is fitted to them:")
    for run in read_runs(PUBLISHED):
        found = predict(run, held)
        memory = f"{found.memory_error:+7.1%}" if run.memory_gib else ""
        speed = f"{run.tokens_per_second:7,.0f} {found.time_error:+7.1%}"
        print(f"{run.label:80} {speed if run.tokens_per_second else '':15} {memory}")
    if arguments.fit:
        new = fit_all(runs)
        for field in fields(Calibration):
            print(f"  {field.name}: {getattr(new, field.name):.4g}")


if __name__ == "__main__":
    main()
