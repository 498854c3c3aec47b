"""Which recipe changes a checkpoint survives."""

import json

import pytest

from ndtrain.errors import CheckpointError
from ndtrain.recipe.schema import Recipe
from ndtrain.train.recipe_changes import BATCH_KEYS, HARMLESS, IMPOSSIBLE, compare_recipes


def resolved(**keys: object) -> dict[str, object]:
    recipe = Recipe(**({"base_model": "m", "learning_rate": 1e-4} | keys))  # type: ignore[arg-type]
    values: dict[str, object] = json.loads(recipe.model_dump_json(by_alias=True))
    return values


def test_every_listed_key_exists_once() -> None:
    known = set(resolved())
    assert known >= HARMLESS | IMPOSSIBLE | BATCH_KEYS
    listed = [*HARMLESS, *IMPOSSIBLE, *BATCH_KEYS]
    assert len(listed) == len(set(listed))


def test_an_unchanged_recipe_says_nothing() -> None:
    changes = compare_recipes(resolved(), resolved())
    assert changes.notices() == ()
    changes.require_possible("step-000001")


def test_three_kinds() -> None:
    changes = compare_recipes(
        resolved(),
        resolved(logging_steps=7, learning_rate=2e-4, adapter="lora", dp_shard_size=2),
    )
    assert [change.key for change in changes.harmless] == ["dp_shard_size", "logging_steps"]
    assert [str(change) for change in changes.changes_result] == ["learning_rate: 0.0001 -> 0.0002"]
    assert [str(change) for change in changes.impossible] == ['adapter: unset -> "lora"']
    with pytest.raises(CheckpointError, match='adapter: unset -> "lora"') as caught:
        changes.require_possible("checkpoints/step-000002")
    assert caught.value.exit_code == 5
    assert len(changes.notices()) == 2


def test_batch_keys_matter_only_through_their_product() -> None:
    before, after = resolved(micro_batch_size=2), resolved(gradient_accumulation_steps=2)
    same = compare_recipes(before, after, saved_batch=2, current_batch=2)
    assert {change.key for change in same.harmless} == {
        "gradient_accumulation_steps",
        "micro_batch_size",
    }
    other = compare_recipes(before, after, saved_batch=2, current_batch=4)
    assert not other.harmless
    assert len(other.changes_result) == 2


def test_a_kernel_change_of_the_same_optimizer_is_possible() -> None:
    fused, plain = resolved(), resolved(optimizer="adamw_torch")
    assert compare_recipes(fused, plain).impossible == ()
    assert compare_recipes(fused, resolved(optimizer="sgd")).impossible != ()


def test_a_key_from_another_version_counts_as_a_change() -> None:
    changes = compare_recipes(resolved() | {"forgotten_key": 1}, resolved())
    assert [change.key for change in changes.changes_result] == ["forgotten_key"]


def test_long_values_are_cut_to_where_they_differ() -> None:
    rows = [{"path": "package://ndtrain/examples/data/parallelism-faq.jsonl", "type": "alpaca"}]
    more = [*rows, {"path": "more.jsonl", "type": "alpaca"}]
    before, after = resolved(datasets=rows), resolved(datasets=more)
    (grown,) = compare_recipes(before, after).changes_result
    old, new = str(grown).removeprefix("datasets: ").split(" -> ")
    assert old == '… null, "seed": null}]'
    assert new == (
        '… null, "seed": null}, {"path": "more.jsonl", "type": "alpaca", "name": null, "…'
    )
    assert len(new) == 80
    (first,) = compare_recipes(resolved(), before).changes_result
    old, new = str(first).removeprefix("datasets: ").split(" -> ")
    assert old == "[]"
    assert new == json.dumps(before["datasets"])[:79] + "…"
    # the record holds them in full
    assert compare_recipes(before, after).changes_result[0].after == after["datasets"]
    assert compare_recipes(before, after).values() == {
        "datasets": {"before": before["datasets"], "after": after["datasets"]}
    }
