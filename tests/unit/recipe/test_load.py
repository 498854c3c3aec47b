import pickle
from pathlib import Path

import pytest

from ndtrain.errors import Problems, RecipeError
from ndtrain.recipe.load import LoadedRecipe, check_rules, load_recipe


def test_defaults_then_file_then_flags(load, minimal) -> None:
    loaded = load(minimal + "seed: 7\nnum_epochs: 2\n", "num_epochs=3")
    assert (loaded.recipe.micro_batch_size, loaded.recipe.seed) == (1, 7)
    assert loaded.recipe.num_epochs == 3
    name = str(loaded.path)
    assert loaded.origins["micro_batch_size"] == "default"
    assert loaded.origins["seed"] == f"{name}:6:1"
    assert loaded.origins["num_epochs"] == "--set"
    assert loaded.origins["datasets[0].path"] == f"{name}:5:5"


def test_every_key_has_an_origin(load, minimal) -> None:
    loaded = load(minimal)
    assert set(type(loaded.recipe).fields_by_key()) <= set(loaded.origins)


def test_positions_for_later_errors(load, minimal) -> None:
    loaded = load(minimal + "seed: 7\n", "optimizer=sgd")
    name = str(loaded.path)
    assert loaded.position("seed") == f"{name}:6:1"
    assert loaded.position("datasets[0].path") == f"{name}:5:5"
    assert loaded.position("datasets.0.path") == f"{name}:5:5"
    assert loaded.position("datasets[0].type") == f"{name}:5:5"
    assert loaded.position("optimizer") == "--set optimizer"
    assert loaded.position("num_epochs") == name


def test_all_problems_at_once_sorted_by_place(complaints, minimal) -> None:
    text = minimal.replace("synthetic", "gone.jsonl") + (
        "    feild_messages: turns\n"
        "dp_shard_sise: 2\n"
        "tensor_parallel_size: two\n"
        "num_epochs: 1\n"
        "num_epochs: 2\n"
    )
    assert complaints(text, "lora_rr=1") == [
        "recipe.yaml:5:5: datasets[0].path: the file 'gone.jsonl' does not exist. "
        f"Paths start at the current folder, '{Path.cwd()}'.",
        "recipe.yaml:6:5: datasets[0].feild_messages: unknown key; did you mean 'field_messages'?",
        "recipe.yaml:7:1: dp_shard_sise: unknown key; did you mean 'dp_shard_size'?",
        "recipe.yaml:8:1: tensor_parallel_size: expected a whole number of at least 1, not 'two'.",
        "recipe.yaml:10:1: num_epochs: duplicate key, given in lines 9 and 10. Keep one of them.",
        "--set lora_rr: unknown key; did you mean 'lora_r'?",
    ]


def test_a_broken_key_is_not_told_twice_by_the_rules(complaints, minimal) -> None:
    text = minimal + "global_batch_size: x\ngradient_accumulation_steps: 2\n"
    (line,) = complaints(text)
    assert line.startswith("recipe.yaml:6:1: global_batch_size: expected a whole number")


def test_a_missing_required_key_does_not_hide_other_problems(complaints) -> None:
    lines = complaints("base_model: x\ndatasets:\n  - type: alpaca\n  - path: gone.jsonl\n")
    assert [line.split(": ")[1] for line in lines] == [
        "learning_rate",
        "datasets[0].path",
        "datasets[1].path",
    ]


def test_problems_of_flags_cite_the_flag(complaints, minimal) -> None:
    assert complaints(minimal, "learning_rate=fast") == [
        "--set learning_rate: expected a number above 0, not 'fast'."
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_utf8_with_or_without_byte_order_mark(load, minimal, encoding: str) -> None:
    loaded = load((minimal + "wandb_project: Übung “1”\n").encode(encoding))
    assert loaded.recipe.wandb_project == "Übung “1”"
    assert loaded.origins["model_config"].endswith(":1:1")


def test_bytes_that_are_not_utf8_say_line_and_column(complaints, minimal) -> None:
    assert complaints(minimal.encode() + b"wandb_project: \x93x\x94\n") == [
        "recipe.yaml:6:16: byte '0x93' is not UTF-8 text. Save the file as UTF-8."
    ]


@pytest.mark.parametrize("name", ["nothing.yaml", "."])
def test_a_missing_recipe_or_a_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / name)
    assert caught.value.where == str(tmp_path / name)


@pytest.mark.parametrize("key", ["special_tokens", "wandb_project", "sample_packing", "tokens"])
def test_an_empty_key_means_its_default(load, minimal, key: str) -> None:
    assert getattr(load(f"{minimal}{key}:\n").recipe, key) == getattr(load(minimal).recipe, key)


def test_null_is_a_value_where_it_means_something(load, minimal) -> None:
    assert load(minimal + "max_grad_norm: null\n").recipe.max_grad_norm is None
    assert load(minimal + "    type:\n").recipe.datasets[0].type is None


def test_an_empty_required_key_is_named(complaints, minimal) -> None:
    (line,) = complaints(minimal.replace("1e-4", ""))
    assert line == "recipe.yaml:3:1: learning_rate: expected a number above 0, not nothing."


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("learning_rate", "2e-5", 2e-5),
        ("weight_decay", "1e-2", 0.01),
        ("adam_epsilon", "1e-10", 1e-10),
        ("warmup_ratio", "3e-2", 0.03),
        ("max_grad_norm", "'5e-1'", 0.5),
        ("num_epochs", "1e0", 1.0),
        ("micro_batch_size", "012", 12),
        ("sequence_len", "1_024", 1024),
        ("save_strategy", "no", "no"),
        ("save_strategy", "false", "no"),
        ("eval_strategy", "no", "no"),
        ("sample_packing", "yes", True),
        ("revision_of_model", "7e10", "7e10"),
        ("revision_of_model", "0123", "0123"),
        ("wandb_project", "2024-01-01", "2024-01-01"),
        ("wandb_project", "12:30:45", "12:30:45"),
        ("wandb_project", "17", "17"),
    ],
)
def test_values_mean_what_the_user_sees(load, minimal, key: str, text: str, value) -> None:
    base = "\n".join(line for line in minimal.splitlines() if not line.startswith(f"{key}:"))
    assert getattr(load(f"{base}\n{key}: {text}\n").recipe, key) == value


def test_numbers_inside_lists_of_texts_keep_their_text(load, minimal) -> None:
    text = minimal + "tokens: [1e3, a]\nlr_groups: [{name: 1, modules: [x], lr: 1e-3}]\n"
    recipe = load(text).recipe
    assert recipe.tokens == ("1e3", "a")
    assert (recipe.lr_groups[0].name, recipe.lr_groups[0].lr) == ("1", 1e-3)


@pytest.mark.parametrize("value", ["nan", ".nan", "inf", "1e999", "-1e-4", "0"])
def test_a_learning_rate_must_be_finite_and_positive(complaints, minimal, value: str) -> None:
    (line,) = complaints(minimal, f"learning_rate={value}")
    assert "expected a number above 0" in line


def test_without_check_a_recipe_loads_whose_files_are_gone(load, minimal) -> None:
    text = minimal.replace("synthetic", "/gone/rows.jsonl")
    loaded = load(text, check=False)
    (error,), _ = check_rules(loaded)
    assert error.message == "datasets[0].path: the file '/gone/rows.jsonl' does not exist."
    with pytest.raises(Problems):
        load(text)


def test_a_loaded_recipe_travels_between_processes(load, minimal) -> None:
    loaded = load(minimal + "seed: 3\n", "num_epochs=2")
    copy: LoadedRecipe = pickle.loads(pickle.dumps(loaded))
    assert copy == loaded


@pytest.mark.parametrize("key", ["sample_packing", "export", "bf16", "shuffle_merged_datasets"])
def test_an_explicit_false_survives_the_way_to_other_processes(load, minimal, key: str) -> None:
    loaded = load(f"{minimal}{key}: false\n")
    copy: LoadedRecipe = pickle.loads(pickle.dumps(loaded))
    assert getattr(copy.recipe, key) is False
    assert key in copy.recipe.model_fields_set


def test_a_recipe_is_frozen(load, minimal) -> None:
    recipe = load(minimal).recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 3
