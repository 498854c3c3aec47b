"""Every bundled recipe that names GPUs plans on them: valid, supported, and it fits."""

import re
from pathlib import Path

import pytest

from ndtrain.plan.hardware import GIB
from ndtrain.plan.machines import Machines
from ndtrain.plan.validate import validate_recipe
from ndtrain.recipe.catalog import list_examples
from ndtrain.recipe.load import load_recipe

EXAMPLES = list_examples()
FOR_GPUS = [example for example in EXAMPLES if example.path.stem not in ("quickstart",)]
FOR_GPUS = [example for example in FOR_GPUS if example.gpus]
COMMAND = re.compile(r"^# +ndtrain plan (?P<file>\S+)(?P<options>(?: --[a-z-]+ \S+)+)$", re.M)


def target(path: Path) -> Machines:
    """The GPUs that the recipe's own planning command names."""
    found = COMMAND.search(path.read_text("utf-8"))
    assert found is not None, "the recipe says how to plan it"
    assert found["file"] == path.name
    words = found["options"].split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    nodes = options.pop("--nodes", "1")
    machines = Machines(int(options.pop("--world-size")), options.pop("--gpu"), int(nodes))
    assert options == {}
    return machines


@pytest.mark.parametrize("example", FOR_GPUS, ids=lambda example: example.name)
def test_it_plans_and_fits_on_the_gpus_it_names(example) -> None:
    machines = target(example.path)
    found = validate_recipe(load_recipe(example.path), machines)
    assert found.problems == ()
    assert found.plan is not None
    assert found.plan.parallel.world_size == machines.world_size == example.gpus
    assert found.predicted is not None, "the model is in the book"
    assert found.predicted.memory.total / GIB <= found.predicted.limit_gib


def test_families_methods_and_sizes_are_covered() -> None:
    models = " ".join(example.model.lower() for example in EXAMPLES)
    for family in ("llama-3", "qwen3", "mistral", "gemma-3", "phi-4", "olmo-2", "smollm"):
        assert family in models
    assert {example.method for example in EXAMPLES} == {"full", "lora", "qlora"}
    assert {0, 1, 4, 8, 16} <= {example.gpus for example in EXAMPLES}
    assert len(EXAMPLES) >= 16


def test_the_sixteen_gpu_example_uses_every_axis_and_long_rows_share_ranks() -> None:
    meshes = {example.name: example.mesh for example in EXAMPLES}
    assert meshes["alpaca-mesh"] == "dp_replicate 2 × dp_shard 2 × cp 2 × tp 2"
    assert meshes["llama-3.1-8b-128k"] == "cp 8"
    assert meshes["llama-3.1-8b-hsdp"] == "dp_replicate 2 × dp_shard 8"
