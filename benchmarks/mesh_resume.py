"""Save on one mesh, resume on another, export, reload: against the run that was never broken.

    python benchmarks/mesh_resume.py --gpus 4 [--one-card] [--json resume.json]

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))

import torch
import yaml
from mesh_cells import SIZES, write_rows
from one_card import run_on_one_card
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
AT_ONCE = 3


def recipe_of(rows: Path, mesh: Sequence[int], device: str, **keys: Any) -> dict[str, Any]:
    """The recipe of one run, in fp32."""
    return {
        # room for the tokenizer: no rows are added to what an adapter leaves frozen
        "model_config": {"model_type": "llama", **SIZES, "vocab_size": 300},
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


def train(folder: Path, name: str, recipe: dict[str, Any], hosts: int) -> list[dict[str, Any]]:
    """Run it; returns its steps."""
    path, run = folder / f"{name}.yaml", folder / name
    path.write_text(yaml.safe_dump({**recipe, "output_dir": str(run)}), encoding="utf-8")
    command = [sys.executable, "-m", "ndtrain", "train", str(path), "--debug"]
    if hosts > 1:
        run_on_one_card(command, hosts)
    else:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-3000:])
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


@dataclass(frozen=True)
class Pair:
    """The mesh that saves, the one that goes on, and what else the recipe says."""

    saving: Sequence[int]
    loading: Sequence[int]
    keys: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.saving} -> {self.loading}{' lora' if self.keys else ''}"

    def differences(self, folder: Path, rows: Path, device: str, hosts: int) -> dict[str, float]:
        """Train on one mesh, go on from its middle on the other, compare what follows."""
        folder.mkdir()
        whole = train(folder, "saved", recipe_of(rows, self.saving, device, **self.keys), hosts)
        saved = folder / "saved" / "checkpoints" / f"step-{SAVED_AT:06d}"
        keys = {**self.keys, "resume_from_checkpoint": str(saved)}
        rest = train(folder, "resumed", recipe_of(rows, self.loading, device, **keys), hosts)
        found = {key: furthest(rest, whole[SAVED_AT:], key) for key in ("loss", "grad_norm")}
        one, other = exported(folder / "saved"), exported(folder / "resumed")
        found["weights"] = max(float((one[key] - other[key]).abs().max()) for key in one)
        return found


def main() -> int:
    """Run all pairs of this many GPUs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, choices=sorted(MESHES), required=True)
    parser.add_argument("--one-card", action="store_true", help="all ranks share one GPU")
    parser.add_argument("--json", type=Path, help="where the numbers go, after each pair")
    parser.add_argument("--tiny", action="store_true", help="one pair, on CPU")
    options = parser.parse_args()
    meshes = MESHES[options.gpus]
    pairs = [Pair(mesh, meshes[(n + 1) % len(meshes)], {}) for n, mesh in enumerate(meshes)]
    pairs.append(Pair(meshes[0], meshes[1], LORA))
    if options.tiny:
        del pairs[1:]
    worst = {"loss": 0.0, "grad_norm": 0.0, "weights": 0.0}
    # the models are so small that pairs share the GPUs: most of a run is its start
    hosts, at_once = (options.gpus, 1) if options.one_card else (1, AT_ONCE)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(at_once) as pool:
        folder = Path(name)
        rows = write_rows(folder / "rows.jsonl", rows=200)
        device = "cpu" if options.tiny else "auto"
        running = [
            pool.submit(pair.differences, folder / str(number), rows, device, hosts)
            for number, pair in enumerate(pairs)
        ]
        for number, (pair, one) in enumerate(zip(pairs, running, strict=True)):
            found = one.result()
            worst = {key: max(worst[key], found[key]) for key in worst}
            print(f"{pair}" + "".join(f"  {key} {one:.1e}" for key, one in found.items()))
            if options.json:
                content = {**worst, "pairs": number + 1}
                options.json.write_text(json.dumps(content), encoding="utf-8")
    return int(max(worst["loss"], worst["weights"]) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
