"""Hold a GPU's bf16 kernels to fp32 on the same rows: packed documents, windows, adapters.

    python benchmarks/gpu_check.py [--steps 50] [--quick] [--json kernels.json]

Prints one line a case; exit code 1 when a loss differs by more than 1 %, or 5 % in fp8.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))

from mesh_cells import SIZES, tiny_recipe, trace_cells, write_rows

WIDER = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama packed": {"sample_packing": True},
    "mistral window packed": {"architecture": "mistral", "sample_packing": True},
    "qwen3 tied packed": {"architecture": "qwen3", "sample_packing": True},
    "gemma2 softcap packed": {"architecture": "gemma2", "sample_packing": True},
    "gpt_oss sinks packed": {"architecture": "gpt_oss", "sample_packing": True},
    "qwen3_moe experts packed": {"architecture": "qwen3_moe", "sample_packing": True},
    "mixtral experts": {"architecture": "mixtral"},
    "llama lora": {"adapter": "lora", "lora_target_linear": True},
    "llama lora dropout packed": {
        "sample_packing": True,
        "adapter": "lora",
        "lora_target_linear": True,
        "lora_dropout": 0.1,
    },
    "llama recompute": {"gradient_checkpointing": True},
    "llama attention kept": {"gradient_checkpointing": "attention", "sample_packing": True},
    "llama memory bf16 states": {"param_dtype": "bf16", "optimizer_state_dtype": "bf16"},
    "llama memory 8-bit states": {"optimizer_state_dtype": "8bit"},
    "llama memory early steps": {
        "optimizer_in_backward": True,
        "max_grad_norm": None,
        "global_batch_size": 1,
    },
    "llama memory offloading": {"gradient_checkpointing": True, "activation_offloading": True},
    "llama fp8 tensorwise": {"fp8": "tensorwise"},
    "llama fp8 rowwise": {"fp8": "rowwise"},
}
QUICK = ("llama packed", "llama lora", "qwen3 tied packed")
ALLOWED, ALLOWED_FP8 = 0.01, 0.05


def main() -> int:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "cases", nargs="*", help="words that a wanted case has in its name; all by default"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="full, adapters and tied, no more")
    parser.add_argument("--flash", choices=("FA3", "FA4"), help="flash attention in torch's place")
    parser.add_argument("--json", type=Path, help="where the numbers go, after each case")
    parser.add_argument("--tiny", action="store_true", help="one case, two steps, on CPU")
    options = parser.parse_args()
    failed = False
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write_rows(folder / "rows.jsonl", rows=400)
        wanted = [case for case in CASES if all(word in case for word in options.cases)]
        if options.quick:
            wanted = [case for case in QUICK if case in wanted]
        device, compiles = "auto", {}
        if options.tiny:
            wanted, options.steps, device = wanted[:1], 2, "cpu"
            compiles = {"bf16": True, "torch_compile": False}
        for case in wanted:
            keys = dict(CASES[case])
            kind = keys.pop("architecture", "llama")
            sizes = {**SIZES, **WIDER, "initializer_range": 0.05}
            if options.flash:
                compiles = {**compiles, "flash_attention_impl": options.flash}
            common = {"device": device, "learning_rate": 1e-3, "sizes": sizes, **compiles, **keys}
            exactly = {**common, "bf16": False, "torch_compile": False, "fp8": False}
            plain = tiny_recipe(rows, kind, **exactly)
            fast = tiny_recipe(rows, kind, **common)
            try:
                exact, quick = (
                    trace_cells([one], folder, options.steps)[0] for one in (plain, fast)
                )
            except Exception as error:
                # one case that cannot run must not hide the others
                failed = True
                print(f"{case:26} failed: {str(error)[-2000:]}", flush=True)
                continue
            pairs = zip(quick.losses, exact.losses, strict=True)
            difference = max(abs(one - other) / other for one, other in pairs)
            failed |= not difference <= (ALLOWED_FP8 if "fp8" in keys else ALLOWED)
            print(f"{case:26} largest loss difference {difference:.2e}", flush=True)
            found[case] = difference
            if options.json:
                in_bf16 = [error for case, error in found.items() if "fp8" not in case]
                content = {"loss": max(in_bf16, default=None), "cases": found}
                options.json.write_text(json.dumps(content), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
