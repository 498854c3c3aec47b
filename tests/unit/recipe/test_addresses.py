import sys
from pathlib import Path

import pytest

from ndtrain.errors import RecipeError
from ndtrain.recipe.addresses import looks_local, resolve_address


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("tatsu-lab/alpaca", False),
        ("alpaca", False),
        ("rows.jsonl", True),
        ("data/rows.csv", True),
        ("model.gguf", True),
        ("/rows", True),
        ("./rows", True),
        ("~/rows", True),
        ("a/b/c", True),
    ],
)
def test_what_can_only_be_a_path(text: str, local: bool) -> None:
    assert looks_local(text) is local


def test_hub_ids_and_urls_are_no_paths() -> None:
    assert resolve_address("tatsu-lab/alpaca") is None
    assert resolve_address("https://example.org/rows.jsonl") is None


def test_an_existing_folder_wins_over_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tatsu-lab" / "alpaca").mkdir(parents=True)
    assert resolve_address("tatsu-lab/alpaca") == Path("tatsu-lab/alpaca")


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_address("~/rows.jsonl") == tmp_path / "rows.jsonl"


def test_files_of_packages_are_found_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_rows"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "data" / "a.jsonl").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    path = resolve_address("package://some_rows/data/a.jsonl")
    assert path == package / "data" / "a.jsonl"
    assert "some_rows" not in sys.modules
    with pytest.raises(RecipeError, match="has no file 'data/b"):
        resolve_address("package://some_rows/data/b.jsonl")


def test_a_misspelt_package_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_tinymodel2").mkdir()
    (tmp_path / "llm_tinymodel2" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError) as caught:
        resolve_address("package://llm_tinymodl2/x.gguf")
    assert str(caught.value) == (
        "the Python package 'llm_tinymodl2' of 'package://llm_tinymodl2/x.gguf' is not installed. "
        "Did you mean package://llm_tinymodel2/x.gguf?"
    )


@pytest.mark.parametrize("address", ["package://no_such_thing/a", "package://../x", "package://"])
def test_a_missing_package_says_how_to_install_it(address: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve_address(address)
    assert "is not installed" in caught.value.message
    assert caught.value.exit_code == 2


def test_bundled_rows_are_found() -> None:
    path = resolve_address("package://ndtrain/examples/data/parallelism-faq.jsonl")
    assert path is not None
    assert path.is_file()
