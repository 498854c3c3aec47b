"""What `ndtrain train` decides and refuses before anything is prepared."""

import json
from pathlib import Path

import pytest

from ndtrain.api import plan
from ndtrain.errors import MeshError, Problems
from ndtrain.plan import machines
from ndtrain.plan.hardware import GIB
from ndtrain.plan.own_run import predict_own_run
from ndtrain.recipe.load import load_recipe
from ndtrain.report.planned_memory import planned_gib
from ndtrain.report.run_directory import RunDirectory
from ndtrain.train.command import train

RECIPE = """\
base_model: Qwen/Qwen3-0.6B
datasets:
  - path: synthetic
learning_rate: 1e-4
dp_shard_size: 2
output_dir: {run}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(run=tmp_path / "run"))
    return path


@pytest.mark.parametrize(
    ("tracker", "error", "said"),
    [
        ("tensorbord", Problems, "did you mean 'tensorboard'"),
        ("trackio", MeshError, r"pip install \"ndtrain\[trackio\]\""),
    ],
)
def test_a_tracker_that_cannot_work_stops_the_run_before_it_begins(
    recipe: Path,
    tracker: str,
    error: type[Exception],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(error, match=said):
        train(recipe, overrides=[f"report_to=[{tracker}]"])
    assert not (recipe.parent / "run").exists()


def test_the_memory_of_a_gpu_is_planned_and_kept(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_recipe(recipe)
    found = plan(loaded)
    monkeypatch.setattr(machines, "local_gpus", lambda: ("h100-80", "h100-80"))
    predicted = predict_own_run(loaded.recipe, found)
    assert predicted is not None
    assert predicted.seconds is not None
    # fp32 weights, gradients and two moments of 596 million parameters, over two ranks
    assert predicted.memory.weights / GIB == pytest.approx(596e6 * 4 / 2 / GIB, rel=0.01)
    folder = RunDirectory(recipe.parent / "run")
    folder.create()
    folder.write_plan(found, extra=predicted.to_json())
    kept = json.loads(folder.plan.read_text())
    parts = planned_gib(kept["memory"])
    assert parts["weights"] == pytest.approx(predicted.memory.weights / GIB)
    assert sum(parts.values()) == pytest.approx(kept["predicted"]["memory_gib"])
    assert kept["predicted"]["memory_gib"] == predicted.memory.reserved / GIB
    assert kept["predicted"]["step_seconds"] == predicted.seconds


@pytest.mark.parametrize("gpus", [(), ("h100-80",)])
def test_a_rank_on_a_cpu_is_planned_with_its_share_of_the_host(
    recipe: Path, gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_recipe(recipe, ["device=cpu"] if gpus else [])
    monkeypatch.setattr(machines, "local_gpus", lambda: gpus)
    predicted = predict_own_run(loaded.recipe, plan(loaded))
    assert predicted is not None
    assert predicted.cluster.gpu.memory_gib == pytest.approx(machines.host_memory() / GIB / 2)
    # nothing is compiled, all is fp32, and nobody has measured the rates
    assert (predicted.setting.compiled, predicted.setting.precision.compute) == (False, 4)
    assert predicted.seconds is None
    parts = planned_gib(predicted.to_json()["memory"])
    assert sum(parts.values()) == pytest.approx(predicted.memory_gib)


def test_nothing_is_planned_for_a_gpu_that_nobody_knows(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_recipe(recipe)
    monkeypatch.setattr(machines, "local_gpus", lambda: ("unknown",))
    assert predict_own_run(loaded.recipe, plan(loaded)) is None
