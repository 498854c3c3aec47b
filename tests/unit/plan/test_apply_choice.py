"""Writing sizes into a recipe touches nothing else."""

import pytest
import yaml

from ndtrain.errors import RecipeError
from ndtrain.plan.apply import set_keys

RECIPE = """\
# A recipe with comments
base_model: m   # the model
tensor_parallel_size: 1 # one
dp_shard_size:   # left open

datasets:
  - path: a.jsonl
    tensor_parallel_size: 9
learning_rate: 1e-4
"""


def test_values_are_replaced_in_place_and_new_keys_are_added_at_the_end():
    text = set_keys(
        RECIPE, {"tensor_parallel_size": "4", "dp_shard_size": "2", "micro_batch_size": "8"}
    )

    assert (
        text
        == """\
# A recipe with comments
base_model: m   # the model
tensor_parallel_size: 4 # one
dp_shard_size: 2   # left open

datasets:
  - path: a.jsonl
    tensor_parallel_size: 9
learning_rate: 1e-4
micro_batch_size: 8
"""
    )


def test_writing_twice_changes_nothing():
    values = {"tensor_parallel_size": "4", "dp_shard_size": "2", "micro_batch_size": "8"}
    once = set_keys(RECIPE, values)

    assert set_keys(once, values) == once


def test_windows_line_ends_and_a_missing_last_one_are_kept():
    text = set_keys("a: 1\r\nb: 2", {"a": "3", "c": "4"})

    assert text == "a: 3\r\nb: 2\r\nc: 4\r\n"


def test_a_mapping_in_braces_stays_one():
    text = set_keys("{a: 1, b: 2}\n", {"b": "3", "c": "4"})

    assert yaml.safe_load(text) == {"a": 1, "b": 3, "c": 4}


def test_a_document_end_stays_last():
    assert set_keys("a: 1\n...\n", {"b": "2"}) == "a: 1\nb: 2\n...\n"


def test_quoted_values_are_replaced_whole():
    assert set_keys("a: '1'\nb: x\n", {"a": "2"}) == "a: 2\nb: x\n"


def test_a_value_that_is_no_scalar_is_refused():
    with pytest.raises(RecipeError) as caught:
        set_keys("a: 1\nb:\n  - 2\n", {"b": "3"}, where="r.yaml")

    assert str(caught.value) == (
        "r.yaml:3:3: b is not a single value, so it cannot be replaced. Write it as one value."
    )


def test_a_list_is_no_recipe():
    with pytest.raises(RecipeError, match=r"r\.yaml: the recipe is not a mapping of keys"):
        set_keys("- a\n", {"b": "3"}, where="r.yaml")
