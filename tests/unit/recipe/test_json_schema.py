import pytest

from ndtrain.errors import RecipeError
from ndtrain.recipe.json_schema import describe_key, recipe_schema
from ndtrain.recipe.schema import Recipe


def test_the_schema_names_every_key_and_refuses_others() -> None:
    schema = recipe_schema()
    assert set(schema["properties"]) == set(Recipe.fields_by_key())
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["learning_rate"]


def test_every_key_has_a_description() -> None:
    schema = recipe_schema()
    groups = [schema, *schema["$defs"].values()]
    silent = [
        key
        for group in groups
        for key, value in group.get("properties", {}).items()
        if not value.get("description")
    ]
    assert silent == []


def test_one_key_explained() -> None:
    assert describe_key("num_epochs") == (
        "num_epochs: a number above 0 (default: 1.0)\n  Passes over the rows."
    )
    assert describe_key("datasets.0.on_bad_row").startswith(
        "datasets.on_bad_row: 'error' or 'skip' (default: error)"
    )


def test_a_group_explains_its_keys() -> None:
    lines = describe_key("special_tokens").splitlines()
    assert lines[0] == "special_tokens: a mapping (default: unset)"
    assert "special_tokens.pad_token: text (default: unset)" in lines


@pytest.mark.parametrize("key", ["num_epoch", "datasets.pth", "", "0", "learning_rate.x"])
def test_an_unknown_key_exits_with_2(key: str) -> None:
    with pytest.raises(RecipeError, match="unknown key"):
        describe_key(key)
