"""The model book: its sizes give the published parameter counts, and it is the last resort."""

import json

import pytest

from ndtrain.errors import MeshError
from ndtrain.plan.book import book_entries, close_in_book, facts_from_book, find_in_book
from ndtrain.plan.facts import facts_from_config
from ndtrain.plan.families import FAMILIES
from ndtrain.plan.model_facts import find_facts
from ndtrain.plan.shapes import count_parameters, model_parameters
from ndtrain.recipe.schema import Recipe


@pytest.mark.parametrize("entry", book_entries(), ids=lambda entry: entry.model_id)
def test_sizes_give_the_published_parameter_count(entry):
    facts = facts_from_config(entry.config, name=entry.model_id, source="book")

    assert entry.config["model_type"] in FAMILIES
    assert count_parameters(facts) / 1e9 == pytest.approx(entry.parameters_b, rel=0.006)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_counting_agrees_with_the_list_of_parameters(model_type):
    config = {"model_type": model_type, "hidden_size": 64, "num_hidden_layers": 5}
    facts = facts_from_config(config, name="m", source="recipe")

    assert count_parameters(facts) == sum(p.numel for p in model_parameters(facts))


def test_there_are_forty_models_and_no_id_twice():
    ids = [name.lower() for entry in book_entries() for name in (entry.model_id, *entry.also)]

    assert len(book_entries()) >= 40
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen3-8b", "mirror/Qwen3-8B", "Qwen3-8B/"])
def test_lookup_by_id_or_last_part(name):
    entry = find_in_book(name)

    assert entry is not None
    assert entry.model_id == "Qwen/Qwen3-8B"


def test_a_model_with_the_same_sizes_is_found():
    facts = facts_from_book("meta-llama/Llama-3.1-8B-Instruct")

    assert facts is not None
    assert (facts.name, facts.source) == ("meta-llama/Llama-3.1-8B-Instruct", "book")
    assert facts.max_positions == 131072


def recipe(**keys):
    return Recipe(**{"learning_rate": 1e-4, **keys})


def test_a_hub_model_that_is_not_here_comes_from_the_book(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    facts = find_facts(recipe(base_model="Qwen/Qwen3-8B"))

    assert (facts.source, facts.num_layers) == ("book", 36)


def test_the_book_helps_when_the_hub_is_switched_off(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    assert find_facts(recipe(base_model="Qwen/Qwen3-8B")).source == "book"


def test_the_hub_cache_wins_over_the_book(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--Qwen--Qwen3-8B"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    (repo / "snapshots" / "abc").mkdir(parents=True)
    config = {"model_type": "qwen3", "num_hidden_layers": 2}
    (repo / "snapshots" / "abc" / "config.json").write_text(json.dumps(config))

    facts = find_facts(recipe(base_model="Qwen/Qwen3-8B"))

    assert (facts.source, facts.num_layers) == ("cache", 2)


def test_a_local_folder_wins_over_the_book(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 256}))

    facts = find_facts(recipe(base_model="Qwen/Qwen3-8B"))

    assert (facts.source, facts.hidden_size) == ("folder", 256)


def test_an_unknown_model_is_refused_with_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(MeshError) as caught:
        find_facts(recipe(base_model="someone/new-model"), where="recipe.yaml:1:1")

    assert str(caught.value) == (
        "recipe.yaml:1:1: the sizes of 'someone/new-model' are not known: it is not downloaded, "
        "and the model book does not have it. Download it once, name its folder, or write its "
        "sizes as model_config."
    )


@pytest.mark.parametrize(
    ("beside", "meant"),
    [((), "."), (("smollm2",), "; did you mean 'models/smollm2'?")],
)
def test_a_name_that_looks_like_a_folder_is_missed_as_one(monkeypatch, tmp_path, beside, meant):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    for name in beside:
        (tmp_path / "models" / name).mkdir(parents=True)

    with pytest.raises(MeshError) as caught:
        find_facts(recipe(base_model="models/smollm"), where="recipe.yaml:1:1")

    assert str(caught.value) == (
        "recipe.yaml:1:1: there is no folder 'models/smollm' here, and it is no downloaded hub "
        f"model either{meant} Paths start at the current folder, '{tmp_path}'; a model of the hub "
        "must be downloaded once."
    )


def test_the_first_part_of_a_name_is_a_folder_here(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()

    with pytest.raises(MeshError, match="there is no folder 'mine/smollm' here"):
        find_facts(recipe(base_model="mine/smollm"))
    with pytest.raises(MeshError, match="the sizes of 'yours/smollm' are not known"):
        find_facts(recipe(base_model="yours/smollm"))


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("someone/smollm", None),
        ("someone/8b", None),
        ("meta-llama/Llama-3-70B", "meta-llama/Meta-Llama-3-70B"),
        ("Qwen/Qwen3-9B", "Qwen/Qwen3-8B"),
        ("someone/new-model", None),
    ],
)
def test_a_model_that_is_written_alike_is_suggested(monkeypatch, tmp_path, name, close):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert close_in_book(name) == close

    with pytest.raises(MeshError) as caught:
        find_facts(recipe(base_model=name))
    said = f"does not have it; did you mean '{close}'? " if close else "does not have it. "
    assert said in str(caught.value)


def test_sizes_written_in_the_recipe_are_used():
    facts = find_facts(recipe(model_config={"model_type": "llama", "hidden_size": 64}))

    assert (facts.source, facts.hidden_size, facts.vocab_size) == ("recipe", 64, 320)
