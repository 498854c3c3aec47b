import math

import pytest

from ndtrain.errors import ExitCode, MeshError
from ndtrain.recipe.schema import Recipe
from ndtrain.report import trackers
from ndtrain.report.events import EvalDone, Notice


def recipe_with(report_to) -> Recipe:
    return Recipe.model_validate(
        {"base_model": "a/b", "learning_rate": 0.5, "report_to": report_to, "lora_alpha": 8}
    )


class Recording:
    """A tracker that remembers; the part of accelerate's interface that is used."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.logged: list[tuple[int | None, dict]] = []
        self.finished = 0
        self._fails_at = fails_at

    def start(self) -> None: ...

    def store_init_configuration(self, values) -> None: ...

    def log(self, values, step=None) -> None:
        if step == self._fails_at:
            raise ConnectionError("no route to host")
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def test_names_are_read_in_every_spelling():
    assert trackers.tracker_names(recipe_with("wandb")) == ("wandb",)
    assert trackers.tracker_names(recipe_with(["wandb", "mlflow", "wandb"])) == ("wandb", "mlflow")
    assert trackers.tracker_names(recipe_with("none")) == ()
    assert trackers.tracker_names(recipe_with([])) == ()


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MeshError) as caught:
        trackers.check_trackers(recipe_with(["wandb", "mlflow"]))
    assert caught.value.exit_code == ExitCode.MESH
    assert str(caught.value) == (
        "report_to: 'wandb', 'mlflow' are not installed. "
        'Run: pip install "ndtrain[wandb,mlflow]", or leave it out; '
        "metrics.jsonl is written in any case."
    )


def test_each_tracker_has_an_extra_and_is_known_to_accelerate():
    import tomllib
    from pathlib import Path

    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    root = Path(__file__).parents[3]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert set(trackers.TRACKERS) <= set(extras["optional-dependencies"])
    assert set(trackers.TRACKERS) <= set(LOGGER_TYPE_TO_CLASS)


def test_constructors_take_what_they_are_given(run_dir):
    import inspect

    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    for name, arguments in trackers.TRACKERS.items():
        kind = LOGGER_TYPE_TO_CLASS[name]
        inspect.signature(kind).bind(**arguments(run_dir, recipe_with(name)))


def test_steps_and_evaluations_arrive(events):
    tracker = Recording()
    reporter = trackers.TrackerReporter("x", tracker, lambda event: None)
    for event in events:
        reporter.write(event)
    reporter.close()
    assert [step for step, _ in tracker.logged] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    assert tracker.logged[0][1] == {"eval/loss": 3.0, "eval/faq/loss": 3.0}
    assert tracker.logged[1][1] == {
        "train/loss": 2.75,
        "train/grad_norm": 0.5,
        "train/lr": 1e-4,
        "train/epoch": 0.25,
        "train/seen_tokens": 100,
        "train/tokens_per_second": 50.0,
        "train/memory_gib": 1.5,
    }
    assert tracker.finished == 1


def test_a_tracker_that_fails_is_named_once_and_left_alone(events):
    tracker, told = Recording(fails_at=2), []
    reporter = trackers.TrackerReporter("wandb", tracker, told.append)
    for event in events:
        reporter.write(event)
    reporter.close()
    assert [step for step, _ in tracker.logged] == [0, 1]
    assert told == [Notice("report_to: 'wandb' failed and gets no more: no route to host")]
    assert tracker.finished == 0


def test_nonfinite_values_are_left_out(step):
    assert "train/loss" not in trackers.tracked_values(step(1, math.nan))
    assert trackers.tracked_values(EvalDone(1, math.inf, 1)) == {}


def test_settings_are_flat():
    assert trackers.flat_settings(recipe_with(["wandb"])) == {
        "base_model": "a/b",
        "learning_rate": 0.5,
        "report_to": "('wandb',)",
        "lora_alpha": 8.0,
    }


def test_no_trackers_need_no_library(run_dir):
    assert trackers.start_trackers(run_dir, recipe_with([]), lambda event: None) == []
