"""Predicted against measured, from `plan.json` and the events."""

import json

import pytest

from ndtrain.errors import CheckpointError
from ndtrain.report import console_lines as lines
from ndtrain.report import prediction
from ndtrain.report.events import Notice, RunEnded
from ndtrain.report.history import gather
from ndtrain.report.metrics import event_record
from ndtrain.report.prediction import PredictionAtEnd, judge_prediction

PLAN = {"predicted": {"device": "h200", "memory_gib": 60.0, "step_seconds": 1.1}}
END = RunEnded("finished", 5, 0)


def told(started, step, seconds, **changes):
    events = [started, *(step(n, step_seconds=s, **changes) for n, s in enumerate(seconds, 1))]
    return gather(event_record(event) for event in events)


def test_the_first_steps_do_not_count(started, step):
    history = told(started, step, [30.0, 9.0, 9.0, 1.0, 1.2, 0.8], memory_gib=50.0)

    verdict = judge_prediction(PLAN, history)

    assert (verdict.measured_seconds, verdict.steps) == (1.0, 3)
    assert str(verdict) == (
        "memory 60.00 GiB predicted, 50.00 measured (+20.0 %); "
        "step 1.1 s predicted, 1 measured (+10.0 %)"
    )


@pytest.mark.parametrize(("seconds", "measured"), [([5.0], 5.0), ([5.0, 2.0], 2.0)])
def test_a_short_run_leaves_out_what_it_can(started, step, seconds, measured):
    assert judge_prediction(PLAN, told(started, step, seconds)).measured_seconds == measured


def test_steps_before_a_resume_belong_to_another_plan(started, step):
    later = type(started)(**{**vars(started), "start_step": 2})
    events = [started, step(1, memory_gib=99.0), step(2), later, step(3, memory_gib=48.0)]
    history = gather(event_record(event) for event in events)

    assert judge_prediction(PLAN, history).measured_gib == 48.0


def test_what_a_profile_holds_does_not_count(started, step, profiled):
    before = [step(n, memory_gib=40.0 + n) for n in range(1, 6)]
    events = [started, *before, profiled, step(6, memory_gib=99.0)]
    assert profiled.first_step == 4
    history = gather(event_record(event) for event in events)

    assert judge_prediction(PLAN, history).measured_gib == 43.0


def test_memory_alone_where_the_rates_are_not_known(started, step):
    plan = {"predicted": {"device": "cpu", "memory_gib": 1.2, "step_seconds": None}}
    verdict = judge_prediction(plan, told(started, step, [1.0]))

    assert str(verdict) == "memory 1.20 GiB predicted, 1.50 measured (−20.0 %)"
    assert verdict.to_json()["prediction_error"]["step"] is None


@pytest.mark.parametrize("plan", [{}, {"predicted": None}])
def test_nothing_is_said_without_a_prediction(plan, started, step):
    assert judge_prediction(plan, told(started, step, [1.0])) is None


def test_nothing_is_said_without_a_step(started):
    assert judge_prediction(PLAN, gather([event_record(started)])) is None


def test_plan_json_keeps_the_measurement_and_the_summary_says_it(tmp_path, started, step):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"v": 1, "world_size": 2, **PLAN}))
    history = told(started, step, [9.0, 2.0, 2.0], memory_gib=48.0)
    notices = []

    PredictionAtEnd(path, history, notices.append).write(END)

    kept = json.loads(path.read_text())
    assert (kept["v"], kept["world_size"]) == (1, 2)
    assert kept["measured"] == {"memory_gib": 48.0, "step_seconds": 2.0, "steps": 2}
    assert kept["prediction_error"]["memory"] == 0.25
    assert notices == []
    summary = list(lines.summary_lines(END, history, tmp_path, 1.0, ""))
    assert "plan   memory 60.00 GiB predicted, 48.00 measured (+25.0 %); " in "".join(summary)


def test_a_file_that_cannot_be_written_does_not_fail_the_run(tmp_path, started, step, monkeypatch):
    def refuse(path, text):
        raise CheckpointError("cannot be written: No space left on device.", where=str(path))

    monkeypatch.setattr(prediction, "replace_text", refuse)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    notices = []

    PredictionAtEnd(path, told(started, step, [1.0]), notices.append).write(END)

    assert json.loads(path.read_text()) == PLAN
    assert [type(notice) for notice in notices] == [Notice]
    assert notices[0].text.startswith("plan.json keeps no measurement: ")
