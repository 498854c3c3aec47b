"""Whatever the recipe: the list holds its batch, and starts with nothing slower than itself."""

from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ndtrain.plan.apply import chosen_keys
from ndtrain.plan.book import facts_from_book
from ndtrain.plan.decide import decide
from ndtrain.plan.machines import Machines
from ndtrain.plan.plan import rows_of_step
from ndtrain.plan.planning import plan_recipe
from ndtrain.recipe.load import load_recipe
from ndtrain.recipe.schema import Recipe

FACTS = facts_from_book("meta-llama/Llama-3.2-1B")
RECOMPUTED = (False, "attention", True)


@st.composite
def recipes(draw):
    """A recipe with a batch in one of its forms, and ranks that need not be its own."""
    keys = {
        "base_model": "meta-llama/Llama-3.2-1B",
        "datasets": [{"path": "synthetic"}],
        "learning_rate": 1e-4,
        "sequence_len": draw(st.sampled_from([512, 8192])),
        "micro_batch_size": draw(st.integers(1, 12)),
        "dp_replicate_size": draw(st.sampled_from([1, 2])),
        "tensor_parallel_size": draw(st.sampled_from([1, 2])),
        "gradient_checkpointing": draw(st.sampled_from(RECOMPUTED)),
        "activation_memory_budget": draw(st.sampled_from([0.5, 0.9, 1])),
        "dp_shard_size": draw(st.sampled_from([None, 1, 2, 3])),
    }
    if keys["gradient_checkpointing"] is True:
        keys["activation_offloading"] = draw(st.booleans())
    form = draw(st.sampled_from(["none", "accumulation", "global"]))
    if form == "accumulation":
        keys["gradient_accumulation_steps"] = draw(st.integers(1, 5))
    elif form == "global":
        keys["global_batch_size"] = draw(st.integers(1, 60))
    others = keys["dp_replicate_size"] * keys["tensor_parallel_size"]
    own = others * (keys["dp_shard_size"] or draw(st.integers(1, 3)))
    world = draw(st.sampled_from([own, own, draw(st.integers(1, 12))]))
    return keys, world


def planned(keys, world):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(keys))
        loaded = load_recipe(path)
    return plan_recipe(loaded, Machines(world, "h100-80", 1), assumed_gpu="h100-80")


@settings(max_examples=40, deadline=None)  # a busy machine is no failure
@given(recipes())
def test_every_mesh_applied_trains_the_rows_of_the_recipe(case):
    keys, world = case
    rows = rows_of_step(Recipe(**keys), world)
    found = planned(keys, world)
    assert found.rows == rows
    for candidate in found.candidates:
        changes = chosen_keys(Recipe(**keys), candidate)
        applied = Recipe(**{**keys, **yaml.safe_load(yaml_of(changes))})
        plan = decide(applied, FACTS, world_size=world)
        assert plan.parallel == candidate.parallel
        assert plan.batch.global_batch == rows
        assert plan.batch.micro_batch == candidate.setting.micro_batch
        assert plan.batch.accumulation == candidate.setting.accumulation


@settings(max_examples=40, deadline=None)
@given(recipes())
def test_nothing_before_the_recipe_is_slower_than_it(case):
    keys, world = case
    found = planned(keys, world)
    own = found.own
    if own is not None and own.fits:
        first = found.candidates[0]
        assert first.fits
        assert first.tokens_per_second >= own.tokens_per_second


def yaml_of(changes):
    return "\n".join(f"{key}: {value}" for key, value in changes.items())
