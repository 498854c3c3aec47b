"""Every bundled recipe takes two steps on a CPU; only size, rows and device are replaced.

Adapter, mesh, packing, optimizer and schedule stay as written. Where the mesh has more ranks than
a test may start, its sizes are lowered to two on one axis that the recipe uses.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_commands import warm_program

from ndtrain.plan.facts import facts_from_config
from ndtrain.plan.shapes import count_parameters
from ndtrain.recipe.catalog import Example, list_examples
from ndtrain.recipe.load import load_recipe
from ndtrain.recipe.schema import Recipe

IN_CI = ("llama-3.1-8b-lora", "alpaca-mesh", "qwen3-4b-mixture")
SEQUENCE_LEN = 512

SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    # some families' own ids lie beyond this vocabulary
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BLOCKS = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
"""Inputs that divide into blocks of 64, so that a base in 4 bits is held in 4 bits."""

TYPES = {
    "llama": "llama",
    "smollm2": "llama",
    "smollm3": "smollm3",
    "qwen3": "qwen3",
    "mistral": "mistral",
    "gemma": "gemma3_text",
    "phi": "phi3",
    "olmo": "olmo2",
}
AXES = {
    "context_parallel_size": "cp",
    "tensor_parallel_size": "tp",
    "dp_replicate_size": "dp_replicate",
    "dp_shard_size": "dp_shard",
}


def model_config(example: Example) -> dict[str, object]:
    family = next(word for word in TYPES if example.model.lower().startswith(word))
    blocks = BLOCKS if example.method == "qlora" else {}
    return {"model_type": TYPES[family], **SIZES, **blocks}


def write_rows(folder: Path) -> dict[str, Path]:
    """Rows of every format that the examples read."""
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello, you."}]
    rows = {
        "chat": {"messages": turns},
        "alpaca": {"instruction": "Say hello.", "input": "", "output": "Hello."},
        "maths": {"question": "1 + 1?", "answer": "2, of course."},
        "text": {"text": "Some words that go on for a while. " * 4},
    }
    paths = {}
    for name, row in rows.items():
        paths[name] = folder / f"{name}.jsonl"
        # rows of their own, for recipes that leave out the same row
        lines = [json.dumps({**row, "number": number}) for number in range(40)]
        paths[name].write_text("\n".join(lines) + "\n")
    return paths


def data_overrides(recipe: Recipe, rows: dict[str, Path]) -> list[str]:
    kinds = {"chat_template": "chat", "alpaca": "alpaca"}
    overrides = []
    for number, source in enumerate(recipe.datasets):
        kind = kinds.get(source.type, "maths") if isinstance(source.type, str) else "maths"
        overrides += [f"datasets.{number}.path={rows[kind]}", f"datasets.{number}.split=train"]
        if source.name:
            overrides.append(f"datasets.{number}.name=null")
    for number in range(len(recipe.pretraining_dataset)):
        overrides += [
            f"pretraining_dataset.{number}.path={rows['text']}",
            f"pretraining_dataset.{number}.name=null",
        ]
    for number in range(len(recipe.test_datasets)):
        overrides.append(f"test_datasets.{number}.path={rows['chat']}")
    return overrides


def mesh_overrides(recipe: Recipe) -> list[str]:
    """At most two ranks, on the innermost axis that the recipe uses."""
    sizes = {key: getattr(recipe, key) or 1 for key in AXES}
    used = [key for key in AXES if sizes[key] > 1]
    return [f"{key}={2 if key in used[:1] else 1}" for key in AXES]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`ndtrain`, whose imports are paid once."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with warm_program(tmp_path_factory.mktemp("bin"), {}, environ) as folder:
        yield folder / "ndtrain"


TRAINED = [
    pytest.param(example, id=example.name, marks=() if example.name in IN_CI else pytest.mark.slow)
    for example in list_examples()
]


@pytest.mark.parametrize("example", TRAINED)
def test_it_takes_two_steps_on_a_cpu(example: Example, program: Path, tmp_path: Path) -> None:
    recipe = load_recipe(example.path).recipe
    overrides = [
        "base_model=null",
        f"model_config={json.dumps(model_config(example))}",
        "tokenizer_config=bytes",
        f"sequence_len={SEQUENCE_LEN}",
        "max_steps=2",
        "device=cpu",
        "global_batch_size=null",
        "gradient_accumulation_steps=1",
        f"output_dir={tmp_path / 'run'}",
        f"dataset_prepared_path={tmp_path / 'prepared'}",
        *data_overrides(recipe, write_rows(tmp_path)),
        *mesh_overrides(recipe),
    ]
    if recipe.special_tokens is not None:
        overrides.append("special_tokens=null")
    command = [str(program), "train", str(example.path)]
    done = subprocess.run(
        [*command, *(word for one in overrides for word in ("--set", one))],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = [*map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())]
    (start,) = [event for event in events if event["event"] == "start"]
    adapters = start["num_trainable"] if recipe.adapter else 0
    facts = facts_from_config(model_config(example), name="tiny", source="test")
    assert start["num_parameters"] == count_parameters(facts) + adapters
    assert bool(start["adapted"]) is bool(adapters)
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == [1, 2]
    assert all(event["loss"] > 0 for event in steps)
    kept = load_recipe(tmp_path / "run" / "resolved.yaml", check=False).recipe
    for key in ("adapter", "sample_packing", "optimizer", "lr_scheduler", "micro_batch_size"):
        assert getattr(kept, key) == getattr(recipe, key)
