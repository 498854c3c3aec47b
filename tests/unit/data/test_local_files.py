"""Which files a folder, a name or a pattern stands for."""

from pathlib import Path
from typing import Any

import pytest

from ndtrain.data.sources import Files, find_source
from ndtrain.errors import DataError, RecipeError
from ndtrain.recipe.schema import DatasetSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rows"


def lay(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


def chosen(folder: Path, path: Path | str | None = None, **keys: Any) -> list[str]:
    spec = DatasetSpec.model_validate({"path": str(path or folder), "type": "completion", **keys})
    source = find_source(spec, 10, 0)
    assert isinstance(source, Files)
    return [str(file.relative_to(folder)) for file in source.paths]


def test_hidden_files_and_descriptions_are_no_rows(folder: Path) -> None:
    lay(folder, ".git/x.json", ".cache.jsonl", "README.md", "notes.md", "Readme.txt", "a.jsonl")
    lay(folder, "dataset_info.json", "state.json", "in/b.txt", "in/.c/d.json", "x.xyz")
    (folder / "folder.jsonl").mkdir()
    assert chosen(folder) == ["a.jsonl", "in/b.txt"]


def test_a_hidden_folder_may_be_named(folder: Path) -> None:
    lay(folder, ".cache/rows/a.jsonl")
    assert chosen(folder, folder / ".cache" / "rows") == [".cache/rows/a.jsonl"]


def test_a_kind_is_a_filter(folder: Path) -> None:
    lay(folder, "a.jsonl", "b.csv", "c.json", "d.txt")
    assert chosen(folder, ds_type="json") == ["a.jsonl", "c.json"]
    with pytest.raises(RecipeError, match=r"holds no parquet file \(\.parquet\)") as caught:
        chosen(folder, ds_type="parquet")
    assert caught.value.where == "ds_type"


def test_files_of_one_split_are_taken(folder: Path) -> None:
    lay(folder, "README.md", *(f"data/{n}-00000-of-00001.parquet" for n in ("test", "train")))
    lay(folder, "data/validation-00000-of-00001.parquet")
    assert chosen(folder) == ["data/train-00000-of-00001.parquet"]
    assert chosen(folder, split="val") == ["data/validation-00000-of-00001.parquet"]
    every = chosen(folder, data_files="data/t*.parquet")
    assert every == ["data/test-00000-of-00001.parquet", "data/train-00000-of-00001.parquet"]


@pytest.mark.parametrize(
    ("names", "split", "known"),
    [
        (("test/a.jsonl", "dev/a.jsonl"), "train", "'test', 'validation'"),
        (("a.jsonl", "b.jsonl"), "test", "'train'"),
    ],
)
def test_a_split_that_is_not_there(
    names: tuple[str, ...], split: str, known: str, folder: Path
) -> None:
    lay(folder, *names)
    with pytest.raises(DataError) as caught:
        chosen(folder, split=split)
    assert str(caught.value) == (
        f"{folder}: the folder has no split '{split}': by their names its files are of {known}. "
        "Set split to one of these, or name the files with data_files."
    )


@pytest.mark.parametrize("kind", ["json", "text"])
def test_a_file_kind_needs_its_files(kind: str, folder: Path) -> None:
    with pytest.raises(RecipeError, match=f"'{kind}' is a file kind") as caught:
        chosen(folder, kind)
    assert caught.value.where == "path"
    assert caught.value.hint == f"Name them with data_files, or write ./{kind} for a folder."


def test_patterns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(folder, "b.jsonl", "a.jsonl", ".hidden.jsonl", "README.md", "in/c.jsonl", "x[1].jsonl")
    monkeypatch.setenv("HOME", str(folder))
    rows = ["a.jsonl", "b.jsonl", "x[1].jsonl"]
    assert chosen(folder, "json", data_files=f"{folder}/*.jsonl") == rows
    assert chosen(folder, "json", data_files="~/*.jsonl") == rows
    assert chosen(folder, "json", data_files=["~/in/c.jsonl", "~/x[1].jsonl"]) == [
        "in/c.jsonl",
        "x[1].jsonl",
    ]
    assert chosen(folder, data_files="**/c*") == ["in/c.jsonl"]
    assert chosen(folder, data_files=f"{folder}/*") == rows
    with pytest.raises(RecipeError, match=r"no file matches '.*/none\*'") as caught:
        chosen(folder, data_files="none*")
    assert caught.value.where == "data_files"
    with pytest.raises(RecipeError, match="no file matches"):
        chosen(folder, data_files="")


def test_a_file_of_an_installed_package() -> None:
    rows = "package://ndtrain/examples/data/parallelism-faq.jsonl"
    source = find_source(DatasetSpec(path="json", data_files=rows), 10, 0)
    assert isinstance(source, Files)
    assert [file.name for file in source.paths] == ["parallelism-faq.jsonl"]
    assert source.paths[0].is_file()
