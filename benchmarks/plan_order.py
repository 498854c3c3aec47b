"""Run the meshes that `ndtrain plan` puts first, and see whether they come in that order.

    python benchmarks/plan_order.py --gpus 4 [--json order.json]

Llama-3-8B full fine-tuning over rows of 8192, eight a step, on H200.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from engines import Asked, our_command, read_ours, recipe_of
from workloads import LLAMA_3_8B, Work

TOP = 3


def plan_words(recipe: Path, gpus: int) -> list[str]:
    """`ndtrain plan` for so many H200."""
    words = [sys.executable, "-m", "ndtrain", "plan", str(recipe)]
    return [*words, "--world-size", str(gpus), "--gpu", "h200"]


def ask_plan(recipe: Path, gpus: int) -> list[dict[str, Any]]:
    """The first meshes, in words and predicted tokens a second."""
    command = [*plan_words(recipe, gpus), "--top", str(TOP), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    meshes: list[dict[str, Any]] = json.loads(done.stdout)["meshes"]
    return meshes


def main() -> None:
    """Plan, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--json", type=Path, help="where the numbers go, after each mesh")
    parser.add_argument("--tiny", action="store_true", help="run a tiny model on the meshes found")
    options = parser.parse_args()
    work = Work(LLAMA_3_8B, 8192, 8 // options.gpus, ranks=options.gpus, steps=8, warm_up=4)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "recipe.yaml"
        recipe = recipe_of(work, folder, Asked())
        recipe["global_batch_size"] = 8
        del recipe["dp_shard_size"]
        recipe["datasets"][0]["length"] = 8 * 8
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        for number, mesh in enumerate(ask_plan(path, options.gpus), start=1):
            own = folder / f"mesh-{number}"
            own.mkdir()
            chosen = own / "recipe.yaml"
            apply = [*plan_words(path, options.gpus), "--apply", str(number)]
            subprocess.run([*apply, "--write", str(chosen)], capture_output=True, check=True)
            keys = yaml.safe_load(chosen.read_text(encoding="utf-8"))
            keys |= {"output_dir": str(own / "run")}
            if options.tiny:
                small = work.tiny()
                keys |= {"model_config": small.model, "sequence_len": small.sequence_len}
                keys["datasets"][0] |= {"sequence_length": 256, "max_input_id": 511}
            chosen.write_text(yaml.safe_dump(keys), encoding="utf-8")
            done = subprocess.run(our_command(chosen), capture_output=True, text=True, check=False)
            found = read_ours(work, own) if done.returncode == 0 else None
            runs.append(
                {
                    "mesh": mesh,
                    "measured": found["tokens"] / found["seconds"] if found else None,
                    "error": (done.stdout + done.stderr)[-800:] if found is None else None,
                }
            )
            sizes = [mesh[axis] for axis in ("dp_replicate", "dp_shard", "cp", "tp")]
            measured = runs[-1]["measured"] or runs[-1]["error"]
            print(
                f"#{number} {sizes} micro {mesh['micro_batch_size']}: predicted "
                f"{mesh['tokens_per_second']:,.0f} tokens/s, measured {measured}",
                flush=True,
            )
            speeds = [run["measured"] for run in runs if run["measured"]]
            content: dict[str, Any] = {"runs": runs}
            if len(speeds) == TOP:
                content["in_order"] = float(speeds == sorted(speeds, reverse=True))
            if options.json:
                options.json.write_text(json.dumps(content, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
