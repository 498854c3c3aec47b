"""Splits by the words in names, as the hub finds them."""

from pathlib import PurePath

import pytest

from ndtrain.recipe.splits import split_in_name, split_name, splits_of


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"),
        ("my_training-2.csv", "train"),
        ("valid.jsonl", "validation"),
        ("rows.val.jsonl", "validation"),
        ("dev0.json", "validation"),
        ("eval rows.json", "test"),
        ("testing", "test"),
        ("latest.jsonl", None),
        ("pretrain.jsonl", None),
        ("trainer.jsonl", None),
        ("evaluations.jsonl", None),
    ],
)
def test_a_split_is_a_word_of_its_own(name: str, split: str | None) -> None:
    assert split_in_name(name) == split


def test_other_words_for_a_split() -> None:
    assert [split_name(word) for word in ("train", "dev", "eval", "train_sft")] == [
        "train",
        "validation",
        "test",
        "train_sft",
    ]


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (["a.jsonl", "b.jsonl"], {"train": ["a.jsonl", "b.jsonl"]}),
        (
            ["test.jsonl", "train-1.jsonl", "train-2.jsonl", "more.jsonl"],
            {"test": ["test.jsonl"], "train": ["train-1.jsonl", "train-2.jsonl"]},
        ),
        (
            ["dev/a.jsonl", "train/test.jsonl", "b.jsonl"],
            {"validation": ["dev/a.jsonl"], "train": ["train/test.jsonl"]},
        ),
        (
            ["data/gen-00000-of-00001.parquet", "data/train_sft-00000-of-00001-ab.parquet"],
            {
                "gen": ["data/gen-00000-of-00001.parquet"],
                "train_sft": ["data/train_sft-00000-of-00001-ab.parquet"],
            },
        ),
    ],
)
def test_splits_of_a_folder(files: list[str], splits: dict[str, list[str]]) -> None:
    found = splits_of([PurePath(file) for file in files])
    assert {split: [str(file) for file in of] for split, of in found.items()} == splits
