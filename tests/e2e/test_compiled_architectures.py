"""Every architecture and kind of adapter trains the same compiled as it does eager."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))

from mesh_cells import ARCHITECTURES, tiny_recipe, trace_cells, write_rows
from test_compiled_policies import assert_rounding

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU needs g++"),
]

STEPS = 2
LORA: dict[str, Any] = {"adapter": "lora", "lora_r": 4, "lora_target_linear": True}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "dropout": {**LORA, "lora_dropout": 0.2},
    "dora": {**LORA, "peft_use_dora": True},
    "qlora": {
        **LORA,
        "adapter": "qlora",
        "load_in_4bit": True,
        "sizes": {"intermediate_size": 128},
    },
}


def check(folder: Path, architecture: str, keys: dict[str, Any]) -> None:
    rows = write_rows(folder / "rows.jsonl")
    fixed = {"sample_packing": True, "micro_batch_size": 2, "global_batch_size": 4}
    recipe = tiny_recipe(rows, architecture, torch_compile=False, **fixed, **keys)
    compiled = recipe.model_copy(update={"torch_compile": True})
    reference, trace = trace_cells([recipe, compiled], folder, STEPS)
    assert_rounding(trace, reference, architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures(architecture: str, tmp_path: Path) -> None:
    check(tmp_path, architecture, {})


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters(kind: str, tmp_path: Path) -> None:
    check(tmp_path, "qwen2", ADAPTERS[kind])
