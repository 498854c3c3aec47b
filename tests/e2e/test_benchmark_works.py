"""The benchmarks are ours to keep working: valid recipes, honest tables, runs on tiny models."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from all_rows import Board, Session, run_jobs, table
from engines import Asked, idle_shares, read_ours, read_peer, recipe_of
from rows import EARLIER, JOBS, TARGETS, Job, Run
from workloads import TINY, WORKS, Work

from ndtrain.plan.decide import decide
from ndtrain.plan.facts import facts_from_config
from ndtrain.recipe.load import load_recipe

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MEMORY_TOOLS = sorted(name for name, work in WORKS.items() if "param_dtype" in work.keys)
RUNS = {run.name: run for job in JOBS for run in job.runs}

# answers with what it was given and when it ran
SCRIPT = """
import json, os, sys, time
started = time.monotonic()
time.sleep(float(sys.argv[1]))
answer = {"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "from": started, "to": time.monotonic()}
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps(answer))
"""


@pytest.mark.parametrize("name", WORKS)
def test_a_work_is_a_recipe_with_a_plan(name: str, tmp_path: Path) -> None:
    work = WORKS[name]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")
    asked = Asked(steps=6, rows=rows, tokenizer=tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_of(work, tmp_path, asked)), encoding="utf-8")
    recipe = load_recipe(path, ()).recipe
    facts = facts_from_config(work.model, name=name, source="recipe")
    assert decide(recipe, facts).parallel.world_size == work.ranks


def test_every_target_rests_on_runs_that_exist() -> None:
    assert {run for target in TARGETS for run in target.needs} <= set(RUNS)
    assert set(EARLIER) <= set(RUNS)
    for run in RUNS.values():
        assert run.work in WORKS or (BENCHMARKS / run.script[0]).is_file()


def session(board: Board, seconds: float) -> Session:
    return Session(
        asked=Asked(),
        board=board,
        deadline=time.monotonic() + seconds,
        tokenizer=None,
        tiny=False,
        peers=True,
        traces=None,
    )


def scripted(folder: Path, name: str, gpus: int, seconds: float, *, sleeps: float) -> Job:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return Job(name, gpus, (Run(name, seconds, script=(str(script), str(sleeps))),))


def test_works_that_need_one_gpu_run_side_by_side(tmp_path: Path) -> None:
    jobs = [
        scripted(tmp_path, "both", 2, 1, sleeps=0.1),
        scripted(tmp_path, "left", 1, 1, sleeps=0.6),
        scripted(tmp_path, "right", 1, 1, sleeps=0.6),
    ]
    board = Board(tmp_path / "rows.json")
    run_jobs(session(board, 60), jobs, ["4", "7"])
    both, left, right = (board.results[job.name] for job in jobs)
    assert (both["gpus"], {left["gpus"], right["gpus"]}) == ("4,7", {"4", "7"})
    assert max(left["from"], right["from"]) < min(left["to"], right["to"])
    assert both["to"] <= min(left["from"], right["from"])
    kept = json.loads((tmp_path / "rows.json").read_text())["results"]
    assert kept == board.results


def test_small_works_fill_the_gpus_that_a_large_one_waits_for(tmp_path: Path) -> None:
    jobs = [
        scripted(tmp_path, "running", 1, 3, sleeps=1.5),
        scripted(tmp_path, "large", 2, 1, sleeps=0.1),
        scripted(tmp_path, "too long to fill in", 1, 60, sleeps=0.1),
        scripted(tmp_path, "filling in", 1, 1, sleeps=0.1),
    ]
    board = Board(None)
    run_jobs(session(board, 100), jobs, ["0", "1"])
    running, large, long, filling = (board.results[job.name] for job in jobs)
    assert filling["to"] < running["to"] <= large["from"]
    assert large["to"] <= long["from"]


def test_a_budget_leaves_out_what_does_not_fit_and_keeps_what_there_is(tmp_path: Path) -> None:
    board = Board(None, {"known": {"gpus": "0"}})
    jobs = [
        scripted(tmp_path, "known", 1, 1, sleeps=60),
        scripted(tmp_path, "too long", 1, 100, sleeps=60),
        scripted(tmp_path, "cut off", 1, 1, sleeps=60),
    ]
    started = time.monotonic()
    run_jobs(session(board, 2), jobs, ["0"])
    assert time.monotonic() - started < 20
    assert board.results["known"] == {"gpus": "0"}
    assert "takes about 100 s" in board.left_out["too long"]
    assert board.results["cut off"]["cut_off"] >= 1.5
    assert not board.is_done("cut off")


def figures(tokens: float, memory: float = 40.0) -> dict[str, Any]:
    return {"tokens": tokens, "seconds": 1.0, "memory_gib": memory}


def test_the_table_says_met_missed_and_not_run() -> None:
    board = Board(None, {"8b-lora/ndtrain": figures(14_600), "8b-lora/accelerate": figures(10_000)})
    board.leave_out("8b-lora/accelerate-ckpt", "no time")
    lines = {line[:52].strip(): line for line in table(board, 1)}
    assert lines["8b-lora: times accelerate"].split()[-4:] == ["1.46", ">=", "1.45", "met"]
    assert lines["8b-lora: GiB"].split()[-4:] == ["40", "<=", "42", "met"]
    assert "not run (no time)" in lines["8b-lora: times accelerate-ckpt"]
    assert "8b-full-4: tokens/s/GPU" not in lines, "one GPU cannot measure it"
    board.results["8b-lora/ndtrain"] = figures(14_000, 42.5)
    lines = {line[:52].strip(): line for line in table(board, 1)}
    assert lines["8b-lora: times accelerate"].split()[-1] == "missed"
    assert lines["8b-lora: GiB"].split()[-1] == "missed"


def test_pauses_between_kernels_are_counted_and_the_hosts_told_apart() -> None:
    def kernel(start: float, length: float, launch: float, kind: str = "kernel") -> list[Any]:
        args = {"correlation": start}
        return [
            {"cat": kind, "ts": start, "dur": length, "args": args},
            {"cat": "cuda_runtime", "ts": launch, "dur": 1, "args": args},
        ]

    # 0-10 and 5-12 overlap, 22-30 holds 24-26; 12-22 and 30-34 are empty, and of those only the
    # second pause ends with what was launched in it
    kernels = kernel(22, 8, 4), kernel(0, 10, -3), kernel(24, 2, 6, "gpu_memcpy"), kernel(5, 7, 1)
    events = [event for pair in (*kernels, kernel(34, 6, 32, "gpu_memset")) for event in pair]
    shares = idle_shares([*events, {"cat": "cpu_op", "ts": 12, "dur": 8}])
    assert shares == pytest.approx({"idle_share": 14 / 40, "host_share": 4 / 40})
    assert idle_shares([{"cat": "cpu_op", "ts": 0, "dur": 1}]) == {}


def test_a_run_that_was_cut_off_still_has_figures(tmp_path: Path) -> None:
    work = Work(TINY, 256, 2, warm_up=1)
    run = tmp_path / "run"
    run.mkdir()
    assert read_ours(work, tmp_path) is None
    steps = [
        {
            "event": "step",
            "loss": 6.0 - step,
            "step_seconds": seconds,
            "tokens_per_second": 512 / seconds,
            "memory_gib": 1.0 + step,
        }
        for step, seconds in enumerate((9.0, 2.0, 4.0, 2.5))
    ]
    lines = [json.dumps(step) for step in steps]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"event": "st']))
    found = read_ours(work, tmp_path)
    assert found is not None
    assert (found["seconds"], found["counted_steps"], found["first_step"]) == (2.5, 3, 9.0)
    assert found["tokens"] == pytest.approx(512)
    assert found["memory_gib"] == 4.0


def test_rows_that_ranks_share_are_counted_once() -> None:
    work = Work(TINY, 256, 1, ranks=4)
    said = 'noise\nRESULT {"tokens": 256, "seconds": 2}\nRESULT {"tokens": 256, "seconds": 1}\n'
    assert read_peer("accelerate-fsdp", work, said) == {"tokens": 1024, "seconds": 1}
    assert read_peer("accelerate-cp-ckpt", work, said) == {"tokens": 256, "seconds": 1}
    assert read_peer("accelerate-fsdp", work, "noise") is None


def all_rows(*words: str) -> str:
    command = [sys.executable, str(BENCHMARKS / "all_rows.py"), "--tiny", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_one_command_runs_a_row_and_goes_on_from_its_file(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    words = ("--gpus", "1", "--only", "8b-lora", "--no-peers", "--steps", "6", "--out", str(out))
    said = all_rows(*words)
    result = json.loads(out.read_text())["results"]["8b-lora/ndtrain"]
    assert result["counted_steps"] == 2, "six, less two that warm up and two that are traced"
    assert result["profile"]
    assert "8b-lora: times accelerate " in said
    assert "not run (not asked for)" in said
    before = out.read_text()
    again = all_rows(*words)
    assert out.read_text() == before
    assert "a tiny model" in again


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", [job.name for job in JOBS if job.gpus == 2 or job.name == "kernels"]
)
def test_the_one_command_runs_two_ranks(job: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    all_rows("--gpus", "2", "--only", job, "--steps", "5", "--out", str(out))
    results = json.loads(out.read_text())["results"]
    # Accelerate's context parallelism and torchtitan run on CUDA only
    known = {run: one for run, one in results.items() if "cp-ckpt" not in run}
    assert not [one["error"] for one in known.values() if "error" in one]


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMORY_TOOLS)
def test_the_memory_tools_run_on_a_tiny_model(name: str) -> None:
    command = [sys.executable, str(BENCHMARKS / "speed.py"), name, "--tiny", "--steps", "6"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tokens/s/device" in done.stdout, done.stdout
