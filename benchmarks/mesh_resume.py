"""Save on one mesh, resume on another, export, reload: against the run that was never broken.

    python benchmarks/mesh_resume.py --gpus 4 [--json resume.json]

Every mesh trains eight steps through `ndtrain train` and saves after four; the next mesh of the
list goes on from there. In fp32, on a tiny model. Prints the largest relative difference of losses
and gradient norms, and the largest of the exported weights, as transformers reads them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))

import torch
import yaml
from mesh_cells import SIZES, write_rows
from transformers import AutoModelForCausalLM

STEPS, SAVED_AT = 8, 4
AXES = (
    "dp_replicate_size",
    "dp_shard_size",
    "context_parallel_size",
    "tensor_parallel_size",
)
MESHES: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((1, 2, 1, 1), (1, 1, 1, 2), (2, 1, 1, 1), (1, 1, 2, 1)),
    4: ((1, 4, 1, 1), (1, 1, 2, 2), (2, 2, 1, 1), (1, 2, 1, 2)),
}
LORA = {"adapter": "lora", "lora_r": 4, "lora_target_linear": True, "lora_dropout": 0.1}
ALLOWED = 1e-4


def recipe_of(rows: Path, mesh: Sequence[int], device: str, **keys: Any) -> dict[str, Any]:
    """The recipe of one run, in fp32."""
    return {
        "model_config": {"model_type": "llama", **SIZES},
        "tokenizer_config": "bytes",
        "datasets": [{"path": str(rows), "type": None}],
        "sequence_len": 32,
        "pad_to_multiple_of": 4,
        "sample_packing": True,
        "global_batch_size": 8,
        "learning_rate": 3e-3,
        # beside Adam's division by small gradients, the rounding of their sums must stay small
        "adam_epsilon": 1e-5,
        "lr_scheduler": "constant",
        "max_steps": STEPS,
        "save_steps": SAVED_AT,
        "num_epochs": 100,
        "bf16": False,
        "torch_compile": False,
        "device": device,
        **dict(zip(AXES, mesh, strict=True)),
        **keys,
    }


def train(folder: Path, name: str, recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """Run it; returns its steps."""
    path, run = folder / f"{name}.yaml", folder / name
    path.write_text(yaml.safe_dump({**recipe, "output_dir": str(run)}), encoding="utf-8")
    command = [sys.executable, "-m", "ndtrain", "train", str(path), "--debug"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit((done.stdout + done.stderr)[-3000:])
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    return [event for event in events if event["event"] == "step"]


def furthest(found: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]], key: str) -> float:
    """The largest relative difference of two runs of steps."""
    pairs = zip(found, wanted, strict=True)
    return max(abs(one[key] - other[key]) / abs(other[key]) for one, other in pairs)


def exported(run: Path) -> dict[str, torch.Tensor]:
    """The weights of a run's export as transformers loads them, adapters included."""
    if (run / "export" / "adapter_config.json").exists():
        from safetensors.torch import load_file

        return load_file(run / "export" / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32)
    return dict(model.state_dict())


def main() -> int:
    """Run all pairs of this many GPUs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, choices=sorted(MESHES), required=True)
    parser.add_argument("--json", type=Path, help="where the numbers go, after each pair")
    parser.add_argument("--tiny", action="store_true", help="one pair, on CPU")
    options = parser.parse_args()
    meshes = MESHES[options.gpus]
    pairs = [(mesh, meshes[(n + 1) % len(meshes)], {}) for n, mesh in enumerate(meshes)]
    pairs.append((meshes[0], meshes[1], LORA))
    worst = {"loss": 0.0, "grad_norm": 0.0, "weights": 0.0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write_rows(folder / "rows.jsonl", rows=200)
        device = "cpu" if options.tiny else "auto"
        for number, (saving, loading, keys) in enumerate(pairs[: 1 if options.tiny else None]):
            first, second = f"saved-{number}", f"resumed-{number}"
            whole = train(folder, first, recipe_of(rows, saving, device, **keys))
            saved = folder / first / "checkpoints" / f"step-{SAVED_AT:06d}"
            going_on = recipe_of(rows, loading, device, resume_from_checkpoint=str(saved), **keys)
            rest = train(folder, second, going_on)
            found = {key: furthest(rest, whole[SAVED_AT:], key) for key in ("loss", "grad_norm")}
            one, other = exported(folder / first), exported(folder / second)
            found["weights"] = max(float((one[key] - other[key]).abs().max()) for key in one)
            worst = {key: max(worst[key], found[key]) for key in worst}
            what = f"{saving} -> {loading}{' lora' if keys else ''}"
            print(what + "".join(f"  {key} {one:.1e}" for key, one in found.items()), flush=True)
            if options.json:
                content = {**worst, "pairs": number + 1}
                options.json.write_text(json.dumps(content), encoding="utf-8")
    return int(max(worst["loss"], worst["weights"]) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
