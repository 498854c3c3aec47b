import io
import json
import math
import shutil

import pytest

from ndtrain.errors import CheckpointError
from ndtrain.recipe.schema import DatasetSpec
from ndtrain.report.commands import compare, env
from ndtrain.report.comparison import relative_distance, setting_differences
from ndtrain.report.metrics import encode_record, read_metrics
from ndtrain.report.run_directory import RunDirectory


@pytest.fixture
def twin(finished, recipe):
    """A second run: another learning rate, one loss apart."""
    other = RunDirectory(finished.path.with_name("twin"))
    shutil.copytree(finished.path, other.path)
    other.write_resolved(recipe.model_copy(update={"learning_rate": 2e-4}), {})
    records = read_metrics(other.metrics)
    for record in records:
        if record["event"] == "step" and record["step"] == 5:
            record["loss"] = 1.75 * (1 + 2**-10)
    other.metrics.write_text("".join(encode_record(record) + "\n" for record in records))
    return other


def lines_of(*arguments, **options) -> list[str]:
    stream = io.StringIO()
    assert compare(*arguments, stream=stream, **options) == 0
    return stream.getvalue().splitlines()


def test_a_run_equals_itself(finished):
    assert lines_of(finished.path, finished.path)[2:] == [
        "recipe  the same settings",
        "loss A  █▇▅▄▂▁",
        "loss B  █▇▅▄▂▁",
        "loss    last 1.5 → 1.5; equal to the last bit over 6 shared steps",
        "eval    last 1.8 → 1.8; equal to the last bit over 3 shared steps",
    ]


def test_what_differs(finished, twin):
    assert lines_of(finished.path, twin.path) == [
        f"A       {finished.path}",
        f"B       {twin.path}",
        "recipe  1 setting differs",
        "        learning_rate: 0.0001 → 0.0002",
        "loss A  █▇▅▄▂▁",
        "loss B  █▇▅▄▂▁",
        "loss    last 1.5 → 1.5; first apart at step 5 (1.75 and 1.752), "
        "at most 9.76e-04 relative apart over 6 shared steps",
        "eval    last 1.8 → 1.8; equal to the last bit over 3 shared steps",
    ]


def test_the_same_for_scripts(finished, twin):
    stream = io.StringIO()
    assert compare(finished.path, twin.path, as_json=True, stream=stream) == 0
    mesh = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    assert json.loads(stream.getvalue()) == {
        "a": str(finished.path),
        "b": str(twin.path),
        "settings": {"learning_rate": {"a": 1e-4, "b": 2e-4}},
        "changed": {"a": {}, "b": {}},
        "mesh": {"a": mesh, "b": mesh},
        "loss": {
            "last": {"a": 1.5, "b": 1.5},
            "shared_steps": 6,
            "largest_relative_distance": (2**-10) / (1 + 2**-10),
            "at_step": 5,
            "there": {"a": 1.75, "b": 1.751708984375},
            "first_apart_at_step": 5,
        },
        "eval": {
            "last": {"a": 1.8, "b": 1.8},
            "shared_steps": 3,
            "largest_relative_distance": 0.0,
            "at_step": 0,
            "there": {"a": 3.0, "b": 3.0},
            "first_apart_at_step": None,
        },
    }


def test_a_setting_that_one_run_lacks_and_a_loss_that_is_no_number(finished, twin):
    text = twin.resolved.read_text()
    twin.resolved.write_text(text.replace("learning_rate: 0.0002", "rate: 0.0002"))
    records = read_metrics(twin.metrics)
    for record in records:
        if record["event"] == "step" and record["step"] == 6:
            record["loss"] = math.nan
    twin.metrics.write_text("".join(encode_record(record) + "\n" for record in records))
    stream = io.StringIO()
    compare(finished.path, twin.path, as_json=True, stream=stream)

    found = json.loads(stream.getvalue())
    assert found["settings"] == {"learning_rate": {"a": 1e-4}, "rate": {"b": 2e-4}}
    assert found["loss"]["largest_relative_distance"] is None
    assert found["loss"]["there"]["b"] is None
    assert found["nonfinite"]["loss"] == {
        "last": {"b": "nan"},
        "largest_relative_distance": "inf",
        "there": {"b": "nan"},
    }


def rewritten(run, change) -> None:
    """Pass each record of a run through `change`; None leaves it out."""
    records = [record for record in map(change, read_metrics(run.metrics)) if record is not None]
    run.metrics.write_text("".join(encode_record(record) + "\n" for record in records))


def test_a_first_step_before_any_update_proves_nothing(finished, twin):
    """Both begin alike, whatever they train afterwards."""
    before = {"step": 1, "eval": 0}
    rewritten(
        twin,
        lambda record: (
            None if record.get("step", 0) > before.get(record["event"], math.inf) else record
        ),
    )
    assert lines_of(finished.path, twin.path)[-2:] == [
        "loss    last 1.5 → 2.75; only step 1, before any update, is in common; it is equal",
        "eval    last 1.8 → 3; only step 0, before any update, is in common; it is equal",
    ]


def test_the_first_step_apart_and_the_step_furthest_apart(finished, twin):
    """Losses that look alike in four digits get as many as tell them apart."""

    def change(record):
        if record["event"] == "step" and record["step"] == 3:
            record["loss"] *= 1 + 2**-20
        return record

    rewritten(twin, change)
    assert lines_of(finished.path, twin.path)[-2] == (
        "loss    last 1.5 → 1.5; first apart at step 3 (2.25 and 2.250002), "
        "at most 9.76e-04 relative apart over 6 shared steps (step 5)"
    )


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (4, "equal to the last bit over 1 shared step"),
        (5, "first apart at step 5 (1.75 and 1.752), 9.76e-04 relative, their only shared step"),
        (9, "no step in common"),
    ],
)
def test_one_shared_step_or_none(finished, twin, step, words):
    rewritten(
        twin,
        lambda record: None if record["event"] == "step" and record["step"] != step else record,
    )
    rows = [line for line in lines_of(finished.path, twin.path) if line.startswith("loss    ")]
    assert [row.partition("; ")[2] for row in rows] == ([words] if step < 9 else [])


def test_both_curves_are_drawn_when_asked(finished, twin, tmp_path):
    plot = tmp_path / "both.svg"
    assert lines_of(finished.path, twin.path, plot=plot)[-1] == f"drawn   {plot}"
    svg = plot.read_text()
    assert 'data-name="small"' in svg
    assert 'data-name="twin"' in svg
    assert svg.count("<polyline") == 2


def test_a_folder_that_is_no_run_is_named(finished, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError) as caught:
        compare(finished.path, tmp_path / "empty")
    assert caught.value.where == str(tmp_path / "empty")


def test_a_run_that_left_no_recipe_is_said_once(finished, twin):
    twin.resolved.unlink()
    lines = lines_of(finished.path, twin.path)
    assert lines[2] == "recipe  B left none"
    assert not [line for line in lines if "absent" in line]


@pytest.mark.parametrize("half", ["learning_rate", "[1, 2]"])
def test_half_a_recipe_is_named(finished, twin, half):
    twin.resolved.write_text(half)
    with pytest.raises(CheckpointError, match=r"resolved\.yaml: cannot be read"):
        compare(finished.path, twin.path, stream=io.StringIO())


def test_differences_by_dotted_key():
    first = {"a": 1, "b": {"c": [1, 2]}, "d": [{"e": 1}, {"e": 2}]}
    second = {"a": 1, "b": {"c": [1, 3]}, "d": [{"e": 1}], "f": None}
    found = {key: (a, b) for key, a, b in setting_differences(first, second)}
    assert set(found) == {"b.c", "d[1]", "f"}
    assert found["d[1]"][0] == {"e": 2}
    assert found["b.c"] == ([1, 2], [1, 3])


def test_a_dataset_that_one_run_lacks_is_one_difference_without_defaults():
    shared, added = (
        DatasetSpec(path=f"{name}.jsonl", type="alpaca").model_dump(mode="json")
        for name in ("faq", "more")
    )
    found = list(setting_differences({"datasets": [shared]}, {"datasets": [shared, added]}))
    assert [(key, b) for key, _, b in found] == [
        ("datasets[1]", {"path": "more.jsonl", "type": "alpaca"})
    ]


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        (1.0, 1.0, 0.0),
        (0.0, 0.0, 0.0),
        (2.0, 1.0, 0.5),
        (-1.0, 1.0, 2.0),
        (math.nan, math.nan, 0.0),
        (math.nan, 1.0, math.inf),
        (math.inf, 1.0, math.inf),
    ],
)
def test_relative_distance(a, b, distance):
    assert relative_distance(a, b) == distance


def test_env_is_readable_for_people_and_scripts(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    for_people, for_scripts = io.StringIO(), io.StringIO()
    assert env(stream=for_people) == 0
    assert env(as_json=True, stream=for_scripts) == 0
    facts = json.loads(for_scripts.getvalue())
    assert f"torch        {facts['packages']['torch']}".split() in [
        line.split() for line in for_people.getvalue().splitlines()
    ]
    assert "very-secret" not in for_people.getvalue() + for_scripts.getvalue()
