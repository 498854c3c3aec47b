"""How each engine is started on a piece of work, and how its figures are read afterwards."""

import gzip
import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from workloads import Work

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Asked:
    """What the command line says of every run.

    Attributes:
        steps: of works that do not say it themselves.
        rows: chat rows for the works on real rows.
        tokenizer: folder of their tokenizer, or `bytes`.
        profile: trace the last two steps of every work.
    """

    steps: int = 12
    rows: Path | None = None
    tokenizer: Path | str | None = None
    profile: bool = False


def recipe_of(work: Work, folder: Path, asked: Asked) -> dict[str, Any]:
    """Our recipe for a piece of work: random rows, nothing saved unless the work says so."""
    steps = work.steps_of(asked.steps)
    rows = work.batch * work.ranks * steps
    recipe: dict[str, Any] = {
        "model_config": work.model,
        "tokenizer_config": "bytes",
        "datasets": [
            {
                "path": "synthetic",
                "type": "_synthetic",
                "length": rows,
                "sequence_length": work.sequence_len,
                "max_input_id": work.model["vocab_size"] - 1,
            }
        ],
        "dataset_prepared_path": str(folder / "prepared"),
        "sequence_len": work.sequence_len,
        "micro_batch_size": work.batch,
        "dp_shard_size": work.ranks,
        "learning_rate": 1e-5,
        "max_steps": steps,
        "output_dir": str(folder / "run"),
        "save_strategy": "no",
        "export": False,
        **work.keys,
    }
    if work.rows:
        recipe["datasets"] = [{"path": str(asked.rows), "type": "chat_template"}]
        recipe["tokenizer_config"] = str(asked.tokenizer)
        # a few rows are enough for a mesh on a tiny model
        recipe["num_epochs"] = 1000
    if asked.profile or work.profiles:
        recipe["profile"] = {"steps": [steps - 1, steps]}
    if work.lora:
        recipe |= {"adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_target_linear": True}
    return recipe


def write_recipe(work: Work, folder: Path, asked: Asked) -> Path:
    """Write the recipe into the folder that its run will live in."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_of(work, folder, asked)), encoding="utf-8")
    return path


def our_command(recipe: Path) -> list[str]:
    """`ndtrain train`."""
    return [sys.executable, "-m", "ndtrain", "train", str(recipe), "--debug"]


def read_ours(work: Work, folder: Path, keep_trace: Path | None = None) -> dict[str, Any] | None:
    """What a run of ours came to, also one that was cut off; None before its warm-up is over.

    Args:
        folder: that the recipe was written into.
        keep_trace: where the trace of a profiled run is copied to.
    """
    run = folder / "run"
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    events = [json.loads(line) for line in lines if line.endswith("}")]
    steps = [event for event in events if event["event"] == "step"]
    counted = steps[work.warm_up :]
    if (run / "trace.json.gz").exists():
        counted = counted[:-2]
    if not counted:
        return None
    seconds = statistics.median(event["step_seconds"] for event in counted)
    speed = statistics.median(event["tokens_per_second"] for event in counted)
    result = {
        "seconds": seconds,
        "tokens": speed * seconds,
        "memory_gib": max(event["memory_gib"] for event in steps),
        "first_step": steps[0]["step_seconds"],
        "losses": [steps[0]["loss"], steps[-1]["loss"]],
        "counted_steps": len(counted),
        **_predicted(run / "plan.json"),
    }
    saves = [event for event in events if event["event"] == "checkpoint"]
    if saves:
        result["blocked_seconds"] = [save["blocked_seconds"] for save in saves]
        result["save_seconds"] = [save["seconds"] for save in saves]
    if (run / "trace.json.gz").exists():
        result |= idle_shares(read_trace(run / "trace.json.gz"))
        told, _, _ = (run / "profile.txt").read_text(encoding="utf-8").partition("\n\n")
        result["profile"] = told.splitlines()
        if keep_trace is not None:
            shutil.copy(run / "trace.json.gz", keep_trace)
    return result


def _predicted(plan: Path) -> dict[str, float]:
    """What planning said of the run, where it says anything of this machine."""
    try:
        predicted = json.loads(plan.read_text(encoding="utf-8")).get("predicted") or {}
    except FileNotFoundError:
        return {}
    names = {"memory_gib": "predicted_memory_gib", "step_seconds": "predicted_seconds"}
    return {names[key]: predicted[key] for key in names if predicted.get(key) is not None}


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def idle_shares(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Shares of the time between the first and the last kernel in which the device did nothing.

    `idle_share` is all of it: kernels that wait in the device's queue start a microsecond or two
    after each other as well. `host_share` is what the device waited for the host, be it loading,
    logging or launching: the kernel that ends such a pause was launched after the pause began.
    Empty without kernels, as on CPU.
    """
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in event.get("args", {})
    }
    spans = sorted(
        (
            event["ts"],
            event["ts"] + event["dur"],
            launched.get(event.get("args", {}).get("correlation"), 0.0),
        )
        for event in events
        if event.get("cat") in kinds
    )
    if not spans:
        return {}
    idle, late, reached = 0.0, 0.0, spans[0][0]
    for start, end, asked in spans:
        pause = max(0.0, start - reached)
        idle += pause
        if asked > reached:
            late += pause
        reached = max(reached, end)
    whole = reached - spans[0][0]
    return {"idle_share": idle / whole, "host_share": late / whole}


def peer_command(name: str, batch: int, work: Work, asked: Asked) -> list[str]:
    """A peer in a process of its own, or in one a GPU."""
    request = {
        "peer": name,
        "model": work.model,
        "sequence_len": work.sequence_len,
        "batch": batch,
        "lora": work.lora,
        "ranks": work.ranks,
        "steps": work.steps_of(asked.steps),
        "rows": str(asked.rows),
        "tokenizer": str(asked.tokenizer),
        "warm_up": work.warm_up,
    }
    launcher = [sys.executable]
    if work.ranks > 1:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={work.ranks}",
        ]
    return [*launcher, str(HERE / "peers.py"), json.dumps(request)]


def read_peer(name: str, work: Work, output: str) -> dict[str, Any] | None:
    """A peer's last result line: it prints one a step, so that one cut off has one too."""
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return None
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    if "tokens" in result and "-cp" not in name:
        # each rank has rows of its own
        result["tokens"] *= work.ranks
    return result


def tokens_per_second(result: Mapping[str, Any], ranks: int) -> float:
    """Of one device."""
    return float(result["tokens"] / result["seconds"] / ranks)
