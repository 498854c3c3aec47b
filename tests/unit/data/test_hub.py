"""Datasets that are no local file: read through `datasets`, here from a folder it can load."""

import json
from pathlib import Path

import pytest

from ndtrain.data.hub import HubSource
from ndtrain.data.sources import find_source
from ndtrain.errors import ExitCode, RecipeError
from ndtrain.recipe.schema import DatasetSpec


def spec(**keys: object) -> DatasetSpec:
    return DatasetSpec.model_validate({"type": "completion", **keys})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"text": "ab", "meta": {"n": 1}}, {"text": "cd", "meta": {"n": 2}}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("streaming", [False, True])
def test_rows(folder: Path, streaming: bool) -> None:
    rows = list(HubSource(spec(path=str(folder)), streaming).rows())
    assert [(row.where, row.parse().data) for row in rows] == [
        (f"{folder}: row 1", {"text": "ab", "meta": {"n": 1}}),
        (f"{folder}: row 2", {"text": "cd", "meta": {"n": 2}}),
    ]


def test_fingerprint_of_a_copy_that_the_hub_does_not_know(folder: Path) -> None:
    first = HubSource(spec(path=str(folder))).fingerprint()
    assert first == HubSource(spec(path=str(folder))).fingerprint()
    (folder / "train.jsonl").write_text('{"text": "other"}\n')
    assert first != HubSource(spec(path=str(folder))).fingerprint()


def test_a_full_commit_needs_no_question() -> None:
    commit = "0123456789" * 4
    assert HubSource(spec(path="a/b", revision=commit)).fingerprint().endswith(commit)


def test_what_looks_like_a_hub_name_goes_to_the_hub() -> None:
    assert isinstance(find_source(spec(path="someone/rows"), 10, 0), HubSource)


def test_a_dataset_that_cannot_be_had(folder: Path) -> None:
    with pytest.raises(RecipeError, match="neither a file here nor readable") as caught:
        list(HubSource(spec(path=str(folder), split="nope")).rows())
    assert caught.value.exit_code is ExitCode.RECIPE
