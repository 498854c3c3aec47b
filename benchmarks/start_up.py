"""From the command to the end of step 1, with the model's weights on disk, stage by stage.

    python benchmarks/start_up.py --work 8b-lora [--folder DIR] [--json start.json]

Writes random weights of the work's shape first, in bf16 and in shards, so that they are in the page
cache. Then `ndtrain train` runs twice: with an empty compile cache and with the one it left.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from engines import Asked, our_command, recipe_of
from workloads import WORKS

SHARD_BYTES = 2 * 2**30
STAGES = (
    # what ends a stage: a file that is written, or the first line that starts so
    ("recipe, plan", "file", ".lock"),
    ("torch", "line", "start "),
    ("tokenizer, rows", "file", "env.json"),
    ("imports, process group", "line", "note   "),
    ("model, weights", "line", "note   precision"),
    ("rows, probes", "line", "run "),
    ("step 1, compiling", "line", "step "),
)


def write_model(sizes: dict[str, Any], folder: Path) -> None:
    """A model folder as transformers saves it, with random weights in bf16."""
    import torch
    from safetensors.torch import save_file
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    keys = dict(sizes)
    config = CONFIG_MAPPING[keys.pop("model_type")](**keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    block = (torch.randn(2**24) * 0.02).to(torch.bfloat16)
    shards: list[dict[str, torch.Tensor]] = [{}]
    held, place = 0, {}
    for name, parameter in model.named_parameters():
        size = 2 * parameter.numel()
        if held and held + size > SHARD_BYTES:
            _save(shards[-1], folder, len(shards), save_file)
            shards.append({})
            held = 0
        times = -(-parameter.numel() // block.numel())
        values = block.repeat(times)[: parameter.numel()].view(parameter.shape)
        shards[-1][name] = torch.ones_like(values) if "norm" in name else values.clone()
        held += size
        place[name] = f"model-{len(shards):05d}.safetensors"
    _save(shards[-1], folder, len(shards), save_file)
    index = {"metadata": {}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _save(tensors: dict[str, Any], folder: Path, number: int, save_file: Any) -> None:
    save_file(tensors, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
    tensors.clear()


def measure(command: list[str], run: Path, cache: Path) -> dict[str, Any]:
    """Start it, stamp its lines, and end it once step 1 is told."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "COLUMNS": "200"}
    environment.pop("TRITON_CACHE_DIR", None)
    started = time.time()
    lines: list[tuple[float, str]] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.time() - started, line.rstrip()))
    if process.returncode:
        return {"error": "\n".join(line for _, line in lines)[-1500:]}
    # fp32 runs word their precision otherwise
    said = [(at, line.replace("note   everything is", "note   precision")) for at, line in lines]
    stages, before = {}, 0.0
    for name, kind, mark in STAGES:
        if kind == "file":
            at = (run / mark).stat().st_mtime - started
        else:
            at = next((at for at, line in said if line.startswith(mark)), before)
        stages[name] = at - before
        before = at
    return {"seconds": before, "first_line": lines[0][0], "stages": stages}


def main() -> int:
    """Write the model, start cold, start warm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", choices=sorted(WORKS), default="8b-lora")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; kept for other works")
    parser.add_argument("--json", type=Path, help="where the numbers go, after each start")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    options = parser.parse_args()
    work = WORKS[options.work].tiny() if options.tiny else WORKS[options.work]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="start-up-") as name:
        folder = Path(name)
        model = (options.folder or folder) / ("tiny" if options.tiny else "model")
        if not (model / "model.safetensors.index.json").exists():
            model.mkdir(parents=True)
            write_model(work.model, model)
        for kind in ("cold", "warm"):
            own = folder / kind
            own.mkdir()
            recipe = recipe_of(work, own, Asked(steps=2))
            recipe |= {"base_model": str(model), "profile": None}
            del recipe["model_config"]
            path = own / "recipe.yaml"
            path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
            result = measure(our_command(path), own / "run", folder / "compiled")
            if "error" in result:
                print(result["error"], file=sys.stderr)
                return 1
            found[f"{kind}_seconds"] = result["seconds"]
            found["first_line_seconds"] = result["first_line"]
            found[f"{kind}_stages"] = result["stages"]
            parts = ", ".join(f"{stage} {one:.1f}" for stage, one in result["stages"].items())
            print(f"{kind}: step 1 ended after {result['seconds']:.1f} s ({parts})", flush=True)
            if options.json:
                options.json.write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
