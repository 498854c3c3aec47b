import pytest


@pytest.mark.parametrize("flag", ["datasets.0.name=en", "datasets[0].name=en"])
def test_list_places_are_reached_by_either_spelling(load, minimal, flag: str) -> None:
    assert load(minimal, flag).recipe.datasets[0].name == "en"


def test_values_are_read_as_yaml(load, minimal) -> None:
    recipe = load(
        minimal,
        "learning_rate=1e-5",
        "sample_packing=true",
        "tokens=[a, b]",
        "special_tokens={pad_token: <pad>}",
        "wandb_project=",
        "model_config.hidden_size=64",
    ).recipe
    assert recipe.learning_rate == 1e-5
    assert recipe.sample_packing is True
    assert recipe.tokens == ("a", "b")
    assert recipe.special_tokens is not None
    assert recipe.special_tokens.pad_token == "<pad>"
    assert recipe.wandb_project is None
    assert recipe.model_config_ == {"model_type": "llama", "hidden_size": 64}


@pytest.mark.parametrize(
    ("value", "meant"),
    [("runs/a #1", "runs/a #1"), ("#1", "#1"), ("a#1", "a#1"), ("'a #1' # told", "a #1")],
)
def test_a_flag_has_no_comments(load, minimal, value: str, meant: str) -> None:
    assert load(minimal, f"output_dir={value}").recipe.output_dir == meant


def test_a_comment_does_not_make_a_number(complaints, minimal) -> None:
    (line,) = complaints(minimal, "seed=5 # five")
    assert "--set seed" in line
    assert "5 # five" in line


def test_missing_mappings_on_the_way_are_made(load, minimal) -> None:
    recipe = load(minimal, "special_tokens.pad_token=x", "test_datasets.0.path=synthetic").recipe
    assert recipe.special_tokens is not None
    assert recipe.special_tokens.pad_token == "x"
    assert recipe.test_datasets[0].path == "synthetic"


def test_the_last_flag_wins(load, minimal) -> None:
    assert load(minimal, "seed=1", "seed=2").recipe.seed == 2


def test_a_whole_list_replaces_the_old_one_and_its_places(load, minimal) -> None:
    loaded = load(minimal, "datasets=[{path: synthetic, name: b}]")
    assert loaded.recipe.datasets[0].name == "b"
    assert loaded.position("datasets[0].path") == "--set datasets"
    assert loaded.origins["datasets"] == "--set"
    assert "datasets[0].path" not in loaded.origins


def test_an_exclusive_key_is_removed_by_null(load, complaints, minimal) -> None:
    text = minimal + "gradient_accumulation_steps: 2\n"
    (line,) = complaints(text, "global_batch_size=8")
    assert line.startswith("--set global_batch_size: excludes")
    loaded = load(text, "global_batch_size=8", "gradient_accumulation_steps=null")
    assert loaded.recipe.gradient_accumulation_steps is None


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("seed", "--set: 'seed' is not of the form KEY=VALUE."),
        ("=3", "--set: '=3' is not of the form KEY=VALUE."),
        ("a..b=3", "--set: 'a..b=3' is not of the form KEY=VALUE."),
        ("0.path=3", "--set: '0.path=3' is not of the form KEY=VALUE."),
        ("datasets.5.path=x", "--set datasets[5].path: 'datasets' is a list of"),
        ("datasets.x=1", "--set datasets.x: 'datasets' is a list of 1; 'x' is not"),
        ("learning_rate.x=1", "--set learning_rate.x: 'learning_rate' is a"),
        ("seed=[1", "--set seed:1:3: not valid YAML"),
        ("sed=1", "--set sed: unknown key; did you mean 'seed'?"),
        ("special_tokens.pad=x", "--set special_tokens.pad: unknown key; did"),
        ("tokens=!!python/name:os x", "--set tokens: the tag"),
    ],
)
def test_a_wrong_flag_is_cited(complaints, minimal, flag: str, line: str) -> None:
    (found,) = complaints(minimal, flag)
    assert found.startswith(line)
