import pytest


def test_variables_are_expanded_where_paths_stand(load, minimal) -> None:
    text = minimal.replace("synthetic", "${WHERE}/rows") + "output_dir: ${OUT:-runs}/a\n"
    loaded = load(text, WHERE="hub", check=False)
    assert loaded.recipe.datasets[0].path == "hub/rows"
    assert loaded.recipe.output_dir == "runs/a"


def test_a_set_variable_wins_over_its_default(load, minimal) -> None:
    loaded = load(minimal + "output_dir: ${OUT:-runs}/a\n", OUT="elsewhere")
    assert loaded.recipe.output_dir == "elsewhere/a"


def test_a_default_may_be_empty_and_replaces_an_empty_variable(load, minimal) -> None:
    text = minimal + "output_dir: a${X:-}b\nlora_model_dir: ${Y:-c}\n"
    recipe = load(text, Y="").recipe
    assert (recipe.output_dir, recipe.lora_model_dir) == ("ab", "c")


def test_data_files_are_paths_too(load, minimal) -> None:
    loaded = load(minimal + "    data_files: ['${A}.x', b]\n", A="one")
    assert loaded.recipe.datasets[0].data_files == ("one.x", "b")


def test_an_undefined_variable_is_an_error_with_its_place(complaints, minimal) -> None:
    text = minimal.replace("synthetic", "${NOWHERE}/rows")
    assert complaints(text) == [
        "recipe.yaml:5:5: datasets[0].path: the environment variable 'NOWHERE' is not set. "
        "Set it, or write '${NOWHERE:-default}'."
    ]


@pytest.mark.parametrize("key", ["default_system_message", "wandb_project"])
def test_a_dollar_elsewhere_is_just_text(load, minimal, key: str) -> None:
    loaded = load(f"{minimal}{key}: 'it costs ${{PRICE}}'\n")
    assert getattr(loaded.recipe, key) == "it costs ${PRICE}"


def test_flags_are_expanded_as_well(load, minimal) -> None:
    assert load(minimal, "output_dir=${OUT}/a", OUT="x").recipe.output_dir == "x/a"
