"""How long the quick commands take, warm, and a run until its first loss.

    python benchmarks/commands.py [--times 9] [--rows alpaca.json] [--json commands.json]

Every command runs in turn, so that a machine that slows down slows all of them down. The first
round is not counted. With --rows, of alpaca kind, a run of a tiny model on them is timed too, up to
the line of its first step. Exit code 1 when a median is above what is aimed at.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from workloads import TINY

QUICKSTART = "examples/quickstart.yaml"
AIMS: dict[str, tuple[list[str], float]] = {
    "--help": (["--help"], 0.3),
    "recipes": (["recipes"], 0.3),
    "validate": (["validate", QUICKSTART], 0.6),
    "plan, 256 GPUs": (["plan", QUICKSTART, "--world-size", "256", "--gpu", "h100-80"], 2.0),
}
FIRST_LOSS = 6.0
MOST_LINES = 12
LOOP = 10**7


def seconds_of(arguments: list[str]) -> float:
    """Wall seconds of one command; it must succeed."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "ndtrain", *arguments], check=True, capture_output=True)
    return time.perf_counter() - started


def first_loss(rows: Path, folder: Path) -> tuple[float, int]:
    """Seconds until the line of the first step is printed, and how many lines came before it."""
    recipe: dict[str, Any] = {
        "model_config": {**TINY, "max_position_embeddings": 2048},
        "tokenizer_config": "bytes",
        "datasets": [{"path": str(rows), "type": "alpaca"}],
        "sequence_len": 2048,
        "learning_rate": 1e-3,
        "max_steps": 1,
        "export": False,
        "output_dir": str(folder / f"run-{time.monotonic_ns()}"),
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    started, lines = time.perf_counter(), 0
    command = [sys.executable, "-m", "ndtrain", "train", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step "):
                taken = time.perf_counter() - started
                process.communicate()
                return taken, lines
            lines += 1
    raise RuntimeError(f"the run ended with {process.returncode} before its first step")


def loop_seconds() -> float:
    """A plain Python loop of ten million turns: how fast this machine is just now."""
    started, total = time.perf_counter(), 0
    for number in range(LOOP):
        total += number
    return time.perf_counter() - started


def summary(name: str, taken: list[float], aim: float) -> Mapping[str, Any]:
    """One row, which is also printed."""
    row = {"median": statistics.median(taken), "least": min(taken), "aim": aim}
    verdict = "met" if row["median"] < aim else "missed"
    print(
        f"{name:16} median {row['median']:.2f} s, least {row['least']:.2f} s, "
        f"aim {aim:.1f} s: {verdict}",
        flush=True,
    )
    return row


def main() -> int:
    """Time all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in AIMS}
    for turn in range(options.times + 1):
        for name, (arguments, _) in AIMS.items():
            seconds = seconds_of(arguments)
            if turn:
                taken[name].append(seconds)
    found = {name: summary(name, taken[name], aim) for name, (_, aim) in AIMS.items()}
    if options.rows is not None:
        with tempfile.TemporaryDirectory() as folder:
            runs = [first_loss(options.rows.resolve(), Path(folder)) for _ in range(4)][1:]
        name = "first loss"
        found[name] = summary(name, [seconds for seconds, _ in runs], FIRST_LOSS)
        print(f"{'':16} {runs[0][1]} lines before it, aim at most {MOST_LINES}")
    print(f"{os.cpu_count()} cores; a plain loop of {LOOP:,} turns takes {loop_seconds():.2f} s")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return int(any(row["median"] >= row["aim"] for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
