import math
from dataclasses import asdict, replace
from pathlib import Path

from ndtrain.report import console_lines as lines
from ndtrain.report.events import EvalDone, RunEnded, RunStarted
from ndtrain.report.history import History, gather
from ndtrain.report.metrics import event_record
from ndtrain.report.model_card import write_model_card
from ndtrain.report.step_time import step_time


def test_start_of_a_full_run(started):
    assert list(lines.start_lines(started)) == [
        "run    runs/small (steps: 6, 3 an epoch)",
        "mesh   dp_replicate 1 × dp_shard 2 × cp 1 × tp 1 = 2 ranks on cpu",
        "model  135M parameters, all trained",
    ]


def test_start_of_a_resumed_adapter_run(started):
    resumed = RunStarted(**{**vars(started), "start_step": 4, "num_trainable": 921_600})
    assert list(lines.start_lines(resumed)) == [
        "run    runs/small (resumes after step 4 of 6, 3 an epoch)",
        "mesh   dp_replicate 1 × dp_shard 2 × cp 1 × tp 1 = 2 ranks on cpu",
        "model  135M parameters, 922k trained (0.69 %)",
    ]
    adapted = RunStarted(**{**vars(resumed), "adapted": ["q_proj", "v_proj"]})
    assert list(lines.start_lines(adapted))[2] == (
        "model  135M parameters, 922k trained (0.69 %): adapters on q_proj, v_proj"
    )


def test_step_line(step):
    assert lines.step_line(step(12, 1.23456, mfu=0.412), 300, 272.0) == (
        "step  12/300    4.0 %  loss 1.2346  lr 1.00e-04  grad 0.5  50 tok/s  1.50 GiB  "
        "MFU 41.2 %  ETA 4m32s"
    )
    assert "loss nan" in lines.step_line(step(1, math.nan), 300, None)


def test_eval_line_tells_the_way_since_the_first():
    history = gather([event_record(EvalDone(0, 3.0, 40))])
    assert lines.eval_line(EvalDone(0, 3.0, 40), history) == "eval   step 0: held-out loss 3.0000"
    assert lines.eval_line(EvalDone(3, 2.4, 40, {"a": 2.0, "b": 2.8}), history) == (
        "eval   step 3: held-out loss 2.4000 (−20.0 % since the first); a 2.0000, b 2.8000"
    )


def test_summary_names_what_is_there(events, finished):
    history = gather(event_record(event) for event in events)
    finished.export.mkdir()
    (finished.export / "config.json").write_text("{}")
    told = lines.summary_lines(events[-1], history, finished.path, 272.0, "ndtrain generate x")
    assert list(told) == [
        "Finished at step 6 after 4m32s",
        "loss   2.7500 → 1.5000  █▇▅▄▂▁",
        "eval   3.0000 → 1.8000  (−40.0 %)",
        "tokens 600 trained on",
        "time   matmul 68 %, attention 24 %, other kernels 6 %, waiting for the host 1 %; 64 % of "
        "the card's matmul rate",
        f"files  {finished.path}/: export, metrics.jsonl",
        "next   ndtrain generate x",
    ]


def test_profile_line_names_its_files(profiled):
    assert lines.profile_line(profiled, Path("runs/small")) == (
        "time   matmul 68 %, attention 24 %, other kernels 6 %, waiting for the host 1 %; 64 % of "
        "the card's matmul rate (runs/small/profile.txt, runs/small/trace.json.gz)"
    )
    unknown = replace(profiled, matmul_tflops=None)
    assert "1 % (runs/small/profile.txt" in lines.profile_line(unknown, Path("runs/small"))


def test_a_profile_of_a_host_tells_operators(profiled):
    shares = {"other kernels": 0.7, "matmul": 0.3}
    on_host = replace(profiled, device="cpu", shares=shares, matmul_tflops=None)
    assert step_time(asdict(on_host)) == (
        "other kernels 70 %, matmul 30 % of the operators' time, waiting for data 0 %"
    )


def test_summary_names_the_step_of_an_export_that_is_of_another(finished):
    finished.export.mkdir()
    write_model_card(finished.export, finished.path, step=2, is_adapter=False)
    files = f"files  {finished.path}/: export (of step 2), metrics.jsonl"
    note = f"note   For the model of step 5: ndtrain export {finished.path} DEST"

    def told(end: RunEnded) -> list[str]:
        return list(lines.summary_lines(end, History(), finished.path, 1.0, ""))[1:]

    assert told(RunEnded("sigint", 5, 130)) == [files, note]
    assert told(RunEnded("max_steps", 5, 0)) == [files, note]
    # the best step, as the recipe asked
    assert told(RunEnded("finished", 5, 0)) == [files]
    assert told(RunEnded("sigint", 2, 130)) == [files.replace(" (of step 2)", "")]


def test_summary_of_a_run_without_steps(tmp_path):
    told = lines.summary_lines(RunEnded("signal", 0, 130), History(), Path("runs/x"), 1.0, "")
    assert list(told) == ["Stopped (signal) at step 0 after 1s", "files  runs/x/"]


def test_eta_is_the_median_of_the_last_steps_without_the_first():
    pace = lines.Pace(warm_up=2, window=3)
    assert pace.eta(10) is None
    for done, seconds in enumerate((100.0, 100.0, 9.0, 2.0, 1.0, 3.0), start=1):
        pace.add(seconds, done)
    assert pace.eta(10) == 20.0
    assert pace.eta(0) is None


def test_eta_is_there_with_the_first_line_that_is_not_of_a_first_step():
    pace = lines.Pace(warm_up=2)
    pace.add(100.0, 1)
    assert pace.eta(10) is None
    pace.add(4.0, 5)  # the line of every fifth step
    assert pace.eta(10) == 40.0


def test_a_start_that_was_told_to_end_early_does_not_say_that_it_finished(tmp_path):
    told = lines.summary_lines(RunEnded("max_steps", 3, 0), gather([]), tmp_path, 5.0, "")
    assert next(iter(told)) == "Stopped (--max-steps) at step 3 after 5s"
