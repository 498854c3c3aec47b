"""A small run, recorded: what every reporter is tested on."""

from pathlib import Path

import pytest

from ndtrain.data.report import DataReport, SourceReport
from ndtrain.plan.plan import BatchPlan, ParallelPlan, Plan
from ndtrain.recipe.schema import Recipe
from ndtrain.report.events import (
    CheckpointSaved,
    EvalDone,
    Event,
    Notice,
    ProfileDone,
    RunEnded,
    RunStarted,
    SamplesDone,
    StepDone,
)
from ndtrain.report.run_directory import RunDirectory

FAQ = SourceReport(
    path="acme/faq",
    rows_in=1000,
    rows_used=988,
    rows_taken=988,
    tokens=80_000,
    trained_tokens=20_000,
    duplicates=3,
    dropped={"too_long": 9},
)
DATA = DataReport(
    sources=(FAQ,),
    train_rows=988,
    eval_rows={"faq": 24},
    tokens=80_000,
    trained_tokens=20_000,
    longest=130,
    lengths=((64, 300), (128, 600), (192, 88)),
    packed_rows=70,
    fill=0.9725,
)


def make_step(step: int, loss: float = 2.0, **changes: float) -> StepDone:
    values = {
        "epoch": step / 4,
        "grad_norm": 0.5,
        "lr": 1e-4,
        "tokens": 100,
        "seen_tokens": 100 * step,
        "step_seconds": 2.0,
        "tokens_per_second": 50.0,
        "tokens_per_second_per_device": 25.0,
        "tflops_per_device": None,
        "mfu": None,
        "memory_gib": 1.5,
    }
    return StepDone(step=step, loss=loss, **{**values, **changes})


PROFILE = ProfileDone(
    step=5,
    first_step=4,
    step_seconds=0.5572,
    device="cuda",
    shares={
        "matmul": 0.684,
        "attention": 0.237,
        "other kernels": 0.064,
        "copies": 0.004,
        "waiting for the host": 0.011,
    },
    data_wait=0.001,
    hidden_communication=0.08,
    tflops_per_device=489.0,
    matmul_tflops=762.0,
    files=["profile.txt", "trace.json.gz"],
)


@pytest.fixture
def profiled() -> ProfileDone:
    return PROFILE


@pytest.fixture
def step():
    return make_step


@pytest.fixture
def started() -> RunStarted:
    return RunStarted(
        run_dir="runs/small",
        start_step=0,
        total_steps=6,
        steps_per_epoch=3,
        mesh={"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1},
        device="cpu",
        num_parameters=134_515_008,
        num_trainable=134_515_008,
    )


@pytest.fixture
def events(started: RunStarted) -> list[Event]:
    """Six steps with everything that can happen in between."""
    return [
        Notice("flash_attention is chosen by ndtrain itself."),
        started,
        EvalDone(0, 3.0, 40, {"faq": 3.0}),
        make_step(1, 2.75),
        make_step(2, 2.5),
        make_step(3, 2.25),
        EvalDone(3, 2.4, 40, {"faq": 2.4}),
        SamplesDone(3, {"What is tp?": "It splits <big> matrices\n& more."}),
        CheckpointSaved(3, "checkpoints/step-000003", 1.5, 0.25),
        make_step(4, 2.0),
        make_step(5, 1.75),
        PROFILE,
        make_step(6, 1.5),
        EvalDone(6, 1.8, 40, {"faq": 1.8}),
        RunEnded("finished", 6, 0),
    ]


@pytest.fixture
def recipe() -> Recipe:
    return Recipe.model_validate(
        {
            "base_model": "acme/tiny-llama",
            "learning_rate": 1e-4,
            "datasets": [{"path": "acme/faq"}, {"path": "/home/me/rows.jsonl", "type": "alpaca"}],
        }
    )


@pytest.fixture
def plan() -> Plan:
    return Plan(ParallelPlan(dp_shard=2), BatchPlan(1, 2, 2), None, ("a notice",))


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "small")
    directory.create()
    return directory


@pytest.fixture
def finished(run_dir: RunDirectory, recipe: Recipe, plan: Plan, events: list[Event]):
    """The folder of the recorded run, with all the files that training writes."""
    from ndtrain.report.metrics import MetricsWriter

    run_dir.write_recipe("base_model: acme/tiny-llama\nlearning_rate: 1e-4\n")
    run_dir.write_resolved(recipe, {"base_model": "r.yaml:1:1", "learning_rate": "--set"})
    run_dir.write_plan(plan, extra={"memory": {"weights": 2**30, "optimizer": 2**31}})
    run_dir.write_data(DATA)
    run_dir.write_env()
    writer = MetricsWriter(run_dir.metrics)
    for event in events:
        writer.write(event)
    writer.close()
    return run_dir
