"""What becomes of an out-of-memory error on a GPU, and of a rank that the kernel killed."""

from pathlib import Path

import pytest
import torch

from ndtrain.api import plan
from ndtrain.errors import ExitCode, OutOfMemoryError
from ndtrain.launch.failure import MEMORY_HINT, describe_failure
from ndtrain.launch.status import RunStatus
from ndtrain.plan import machines
from ndtrain.plan.model_source import find_model
from ndtrain.plan.own_run import predict_own_run
from ndtrain.recipe.load import load_recipe
from ndtrain.report.run_directory import RunDirectory
from ndtrain.train.job import Job
from ndtrain.train.memory_failure import explain_launch, explain_rank

RECIPE = """\
base_model: meta-llama/Llama-3.1-8B
datasets: [{path: synthetic}]
sequence_len: 8192
micro_batch_size: 4
learning_rate: 1e-5
dp_shard_size: 8
"""
STATUS = RunStatus("training", "training", 12, "run", 1, 0.0)
CUDA = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.19 GiB of "
    "which 1.02 GiB is free. Including non-PyTorch memory, this process has 78.1 GiB memory in use."
)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machines, "local_gpus", lambda: ("h100-80",) * 8)
    loaded = load_recipe(path)
    found = plan(loaded)
    return Job(
        loaded=loaded,
        plan=found,
        source=find_model(loaded.recipe),
        run_dir=RunDirectory(tmp_path / "run"),
        run_id="run",
        prepared=tmp_path,
        num_tokens=0,
        prediction=predict_own_run(loaded.recipe, found),
    )


def test_a_gpu_without_memory_tells_rank_step_plan_and_what_would_fit(job: Job) -> None:
    error = explain_rank(job, 3, STATUS, CUDA)

    assert isinstance(error, OutOfMemoryError)
    first, *changes = str(error).splitlines()
    assert first.startswith(
        "rank 3, training, step 12: the device ran out of memory (it tried to allocate 2.00 GiB). "
        "Planned were "
    )
    assert "of the 79.2 GiB: weights 3.7, gradients 3.7, optimizer 7.5, activations " in first
    assert [line[:5] for line in changes] == ["  1. ", "  2. ", "  3. "]


def test_it_reaches_the_launcher_whole(job: Job) -> None:
    error = explain_rank(job, 3, STATUS, CUDA)
    error.__cause__ = CUDA

    failure = describe_failure(error, rank=3)

    assert (failure.kind, failure.exit_code) == ("error", ExitCode.MEMORY)
    assert OutOfMemoryError(failure.message, where=failure.where, hint=failure.hint).args == (
        error.args
    )


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 3221225472 bytes. Error code 12",
            "(it tried to allocate 3.00 GiB)",
        ),
        ("NCCL could not: out of memory.", "(NCCL could not: out of memory)"),
    ],
)
def test_the_cause_is_what_the_allocator_said(job: Job, said: str, told: str) -> None:
    assert told in str(explain_rank(job, 0, STATUS, RuntimeError(said)))


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), KeyboardInterrupt()])
def test_other_errors_stay_what_they_are(job: Job, error: BaseException) -> None:
    assert explain_rank(job, 0, STATUS, error) is error


KILLED = OutOfMemoryError(
    "Rank 5 was killed by signal 9: the host ran out of memory.",
    where="run/logs/rank-5.log",
    hint=MEMORY_HINT,
)


def test_a_process_that_the_kernel_killed_is_explained_by_the_launcher(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "local_gpus", lambda: ())
    on_host = Job(**{**vars(job), "prediction": predict_own_run(job.recipe, job.plan)})

    error = explain_launch(on_host, KILLED)

    assert str(error).startswith(
        "run/logs/rank-5.log: the host ran out of memory (Rank 5 was killed by signal 9: the host "
        "ran out of memory). Planned were "
    )
    assert "that are this rank's share: weights 3.7, gradients 3.7, " in str(error)


def test_the_plan_of_a_gpu_says_nothing_of_its_host(job: Job) -> None:
    assert explain_launch(job, KILLED) is KILLED


def test_what_a_rank_has_explained_is_left_alone(job: Job) -> None:
    told = explain_rank(job, 3, STATUS, CUDA)
    assert isinstance(told, OutOfMemoryError)

    assert explain_launch(job, told) is told


def test_without_a_prediction_the_old_advice_is_given(job: Job) -> None:
    unknown = Job(**{**vars(job), "prediction": None})

    error = explain_rank(unknown, 1, STATUS, CUDA)

    assert str(error) == (
        "rank 1, training, step 12: out of memory: it tried to allocate 2.00 GiB. " + MEMORY_HINT
    )
