"""Profiling of some steps: what is recorded, what is told, and what is left alone."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import record_function

from ndtrain.data.batch import StepBatch
from ndtrain.plan.book import find_in_book
from ndtrain.plan.facts import facts_from_config
from ndtrain.report.events import Notice, ProfileDone
from ndtrain.report.run_directory import RunDirectory
from ndtrain.train import profile_words as words
from ndtrain.train.matmul_rate import matmul_tflops
from ndtrain.train.meter import Meter
from ndtrain.train.profile import StepProfiler, read_steps, sort_events, tell
from ndtrain.train.step_account import Span, account

CPU = torch.device("cpu")
FILES = ["profile.txt", "trace.json.gz"]


def meter(folder: Path, world_size: int = 1) -> Meter:
    return Meter(CPU, world_size, None, 8, frozen=False, output=folder)


def batches(count: int) -> Iterator[StepBatch]:
    for place in range(count):
        yield StepBatch((), 8, 8, place, place + 1, 0.0)


def walk(profiler: StepProfiler, first: int, last: int, run: Path) -> list[tuple[int, int]]:
    """Take the steps as the loop does; the first and last step of each profile."""
    done = []
    for step, _ in enumerate(profiler.watch(batches(last - first + 1), first, last), start=first):
        with record_function("Optimizer.step#SGD.step"):
            torch.ones(64, 64) @ torch.ones(64, 64)
        if profiler.is_last(step):
            (told,) = profiler.finish(meter(run))
            assert isinstance(told, ProfileDone)
            done.append((told.first_step, step))
            assert (told.step, told.files) == (step, FILES)
    return done


@pytest.mark.parametrize(
    ("asked", "first", "last", "found"),
    [
        ((2, 3), 1, 4, [(2, 3)]),
        ((1, 1), 1, 4, [(1, 1)]),
        ((3, 9), 1, 4, [(3, 4)]),  # the run ends before the profile
        ((5, 6), 1, 4, []),
        ((2, 3), 3, 6, []),  # resumed after the first of them
        ((2, 3), 4, 6, []),
        ((4, 4), 4, 6, [(4, 4)]),  # resumed right before it
    ],
)
def test_which_steps_are_profiled(asked, first, last, found, tmp_path) -> None:
    profiler = StepProfiler(read_steps({"steps": list(asked)}), RunDirectory(tmp_path), CPU)
    done = walk(profiler, first, last, tmp_path)
    assert done == found
    assert [path.name for path in sorted(tmp_path.iterdir())] == (FILES if found else [])
    is_past = first > asked[1]
    assert (profiler.close() is None) == bool(found or is_past)


def test_a_profile_that_does_not_happen_is_told_of(tmp_path) -> None:
    def missing(steps: range) -> str | None:
        profiler = StepProfiler(steps, RunDirectory(tmp_path), CPU)
        walk(profiler, 1, 4, tmp_path)
        return profiler.close()

    assert missing(range(5, 6)) == (
        "Step 5 did not happen in this start: there is no profile of it."
    )
    assert missing(range(7, 9)) == (
        "Steps 7 to 8 did not all happen in this start: there is no profile of them."
    )
    assert missing(range(2, 4)) is None


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_written_does_not_cost_the_run(name: str, tmp_path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").touch()
    profiler = StepProfiler(range(1, 2), RunDirectory(tmp_path), CPU)
    for step, _ in enumerate(profiler.watch(batches(1), 1, 1), start=1):
        assert profiler.is_last(step)
        done, notice = profiler.finish(meter(tmp_path))
    assert isinstance(done, ProfileDone)
    assert done.files == [one for one in FILES if one != name]
    assert notice == Notice(f"{tmp_path / name} cannot be written: Is a directory.")
    # nothing half written is left
    assert [path.name for path in sorted(tmp_path.iterdir())] == FILES


def test_a_run_without_a_profile_gets_its_own_batches_back(tmp_path) -> None:
    profiler = StepProfiler(read_steps(None), RunDirectory(tmp_path), CPU)
    given = batches(3)
    assert profiler.watch(given, 1, 3) is given
    assert not profiler.is_starting(1)
    assert not profiler.is_last(1)


def test_a_run_that_ends_early_leaves_nothing_running(tmp_path) -> None:
    for stops_after in (2, 1):  # while it records, and when it has only got ready
        profiler = StepProfiler(range(2, 6), RunDirectory(tmp_path), CPU)
        taken = profiler.watch(batches(9), 1, 9)
        for _ in range(stops_after):
            next(taken)
        profiler.close()
        profiler.close()
        assert not list(tmp_path.iterdir())
    profiler = StepProfiler(range(1, 2), RunDirectory(tmp_path), CPU)
    assert walk(profiler, 1, 1, tmp_path) == [(1, 1)]


def test_the_first_wait_for_data_is_seen(tmp_path) -> None:
    def slow() -> Iterator[StepBatch]:
        for batch in batches(3):
            time.sleep(0.05)
            yield batch

    profiler = StepProfiler(range(2, 3), RunDirectory(tmp_path), CPU)
    for step, _ in enumerate(profiler.watch(slow(), 1, 3), start=1):
        torch.ones(4) + 1
        if profiler.is_last(step):
            (told,) = profiler.finish(meter(tmp_path))
    assert isinstance(told, ProfileDone)
    assert told.step_seconds >= 0.05
    assert 0.5 < told.data_wait <= 1
    assert told.device == "cpu"
    assert sum(told.shares.values()) == pytest.approx(1)


def event(
    name: str, start: float, end: float, *, cuda: bool = True, annotation: bool = False
) -> FunctionEvent:
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    return FunctionEvent(
        id=0,
        name=name,
        thread=0,
        start_us=start,
        end_us=end,
        device_type=kind,
        is_user_annotation=annotation,
    )


def test_annotations_are_no_kernels() -> None:
    seen = sort_events(
        [
            event("ndtrain: next batch", 20, 22, cuda=False, annotation=True),
            event("ndtrain: next batch", 2, 5, cuda=False, annotation=True),
            event("aten::mm", 5, 6, cuda=False),
            event("nvjet_sm90_tst", 6, 16),
            event("FSDP::post_backward_reduce model.layers.0", 6, 18, annotation=True),
            event("Optimizer.step#AdamW.step", 16, 18, annotation=True),
            event("Optimizer.step#AdamW.step", 7, 8, cuda=False, annotation=True),
            event("triton_poi_fused_add_0", 16, 18),
        ]
    )
    assert seen.on_device
    assert [span.name for span in seen.work] == ["nvjet_sm90_tst", "triton_poi_fused_add_0"]
    assert seen.own == [10, 2]
    assert [(call.kind, call.own) for call in seen.timed()] == [("matmul", 10), ("optimizer", 2)]
    # from the first batch that was asked for
    assert seen.window == (2, 22)
    found = seen.account()
    assert {kind: took for kind, took in found.times.items() if took} == {
        "matmul": 10,
        "optimizer": 2,
        "waiting for data": 5,
        "between kernels": 3,
    }


def test_a_host_counts_operators_without_annotations() -> None:
    seen = sort_events(
        [
            event("ndtrain: next batch", 0, 4, cuda=False, annotation=True),
            event("Optimizer.step#SGD.step", 10, 20, cuda=False, annotation=True),
            event("aten::add_", 12, 14, cuda=False),
            event("aten::mm", 4, 9, cuda=False),
        ]
    )
    assert not seen.on_device
    assert [(call.name, call.kind) for call in seen.timed()] == [
        ("aten::add_", "optimizer"),
        ("aten::mm", "matmul"),
    ]


def test_a_devices_steps_as_an_event_and_as_a_file() -> None:
    fetch = event("ndtrain: next batch", 0, 1e5, cuda=False, annotation=True)
    kernels = [event("nvjet", 1e5, 8e5), event("ncclDevKernel", 7e5, 9e5)]
    seen = sort_events([fetch, *kernels, event("aten::mm", 1e5, 10e5, cuda=False)])
    done, text = tell(seen, range(10, 13), work=400.0, matmul=800.0, alone=False)
    assert done == ProfileDone(
        step=12,
        first_step=10,
        step_seconds=pytest.approx(0.3),
        device="cuda",
        shares=pytest.approx(
            {
                **dict.fromkeys(done.shares, 0.0),
                "matmul": 7 / 9,
                "waiting for other ranks": 1 / 9,
                "waiting for data": 1 / 9,
            }
        ),
        data_wait=pytest.approx(1 / 9),
        hidden_communication=pytest.approx(1 / 9),
        tflops_per_device=400.0,
        matmul_tflops=800.0,
        files=[],
    )
    account_lines, _, table = text.partition("\n\n")
    assert account_lines.splitlines()[:2] == [
        "Steps 10 to 12, 300.0 ms each, on the main rank's device:",
        "matmul                     233.33 ms   77.8 %",
    ]
    assert account_lines.splitlines()[-2:] == [
        "Ranks exchange for 66.7 ms a step, 33.3 ms of it beside other kernels.",
        "400 TFLOP/s of model work a device: 50 % of the 800 that one large bf16 matrix product "
        "reaches on this card.",
    ]
    assert [line.split()[-1] for line in table.splitlines()] == [
        "kernel",
        "nvjet",
        "ncclDevKernel",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="times a product on a CUDA device")
def test_a_card_is_timed_without_touching_the_runs_random_numbers() -> None:
    before = torch.cuda.get_rng_state()
    rate = matmul_tflops(torch.device("cuda"))
    assert rate is not None
    assert rate > 1
    assert torch.equal(torch.cuda.get_rng_state(), before)


def spans() -> list[Span]:
    return [Span("nvjet", 0, 700e3), Span("ncclDevKernel", 600e3, 800e3)]


def test_the_account_in_words() -> None:
    found = account(spans(), optimizer=[], fetches=[], window=(0, 1e6))
    assert words.steps_words(10, 11, 0.5) == "Steps 10 to 11, 500.0 ms each"
    assert words.steps_words(10, 10, 0.5) == "Step 10, 500.0 ms"
    assert list(words.device_lines(found, 2, alone=False)) == [
        "matmul                     350.00 ms   70.0 %",
        "attention                    0.00 ms    0.0 %",
        "optimizer                    0.00 ms    0.0 %",
        "other kernels                0.00 ms    0.0 %",
        "copies                       0.00 ms    0.0 %",
        "between kernels              0.00 ms    0.0 %",
        "waiting for other ranks     50.00 ms   10.0 %",
        "waiting for data             0.00 ms    0.0 %",
        "waiting for the host       100.00 ms   20.0 %",
        "Ranks exchange for 100.0 ms a step, 50.0 ms of it beside other kernels.",
    ]


def test_a_run_alone_waits_for_nobody() -> None:
    found = account(spans()[:1], optimizer=[], fetches=[], window=(0, 1e6))
    kinds = [line[:23].strip() for line in words.device_lines(found, 2, alone=True)]
    assert kinds == [
        *("matmul", "attention", "optimizer", "other kernels", "copies"),
        *("between kernels", "waiting for data", "waiting for the host"),
    ]


def test_the_rate_in_words() -> None:
    assert words.rate_line(489.1, 762.4) == (
        "489 TFLOP/s of model work a device: 64 % of the 762 that one large bf16 matrix product "
        "reaches on this card."
    )
    assert words.rate_line(489.1, None) == (
        "489 TFLOP/s of model work a device; the card had no room to time a matrix product beside "
        "the run."
    )
    assert words.rate_line(None, 762.4) == (
        "The model's work is not known; one large bf16 matrix product reaches 762 TFLOP/s on this "
        "card."
    )


def test_the_longest_calls_stand_first() -> None:
    calls = [
        words.Timed("b", "other kernels", 1000.0),
        words.Timed("a", "matmul", 3000.0),
        words.Timed("b", "optimizer", 500.0),
        words.Timed("b", "other kernels", 4000.0),
    ]
    assert words.sums_by_kind(calls) == {
        "other kernels": 5000.0,
        "matmul": 3000.0,
        "optimizer": 500.0,
    }
    assert list(words.longest_lines(calls, 2)) == [
        "    ms/step  calls/step  kind            kernel",
        "       2.50         1.0  other kernels   b",
        "       1.50         0.5  matmul          a",
        "       0.25         0.5  optimizer       b",
    ]


def test_the_work_of_several_steps_is_metered_like_that_of_one(tmp_path) -> None:
    assert meter(tmp_path).tflops_per_device(100, 2.0) is None
    config = find_in_book("meta-llama/Llama-3.1-8B").config
    on_cuda = replace(
        meter(tmp_path, 4),
        device=torch.device("cuda"),
        facts=facts_from_config(config, name="8B", source="book"),
        peak_tflops=1000.0,
    )
    rates = on_cuda.rates(next(batches(1)), 2.0)
    assert rates.tflops_per_device == pytest.approx(8 / 2 / 4 * 6 * 8e9 / 1e12, rel=0.1)
    assert rates.mfu == rates.tflops_per_device / 1000
    assert on_cuda.tflops_per_device(3 * 8, 3 * 2.0) == pytest.approx(rates.tflops_per_device)
