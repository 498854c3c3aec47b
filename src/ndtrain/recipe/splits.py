"""Which split a file belongs to, by the words in its name: the hub's own rules for its datasets."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

_WORDS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLITS: Mapping[str, str] = {word: split for split, words in _WORDS.items() for word in words}
_WORD = re.compile(
    rf"(?:^|[-._ 0-9])({'|'.join(sorted(_SPLITS, key=len, reverse=True))})(?=[-._ 0-9]|$)"
)
_SHARD = re.compile(r"data/(.+)-\d{5}-of-\d{5}[^/]*\.[^/]*")


def split_name(word: str) -> str:
    """The split that a recipe means: `val` and `dev` are other words for validation."""
    return _SPLITS.get(word, word)


def split_in_name(name: str) -> str | None:
    """The split whose word stands in the name of a file or folder: `rows_val-2.jsonl`."""
    found = _WORD.search(name)
    return _SPLITS[found[1]] if found else None


def splits_of(files: Sequence[PurePath]) -> Mapping[str, Sequence[PurePath]]:
    """The files of each split; files without one are left out, unless no file has one.

    Shards in `data` name any split, as in `data/train_sft-00000-of-00003.parquet`. Elsewhere the
    folders decide, and the names of the files where no folder does.

    Args:
        files: relative to the folder of the dataset.
    """
    for find in (_of_shard, _of_folders, _of_file):
        found: dict[str, list[PurePath]] = {}
        for file in files:
            split = find(file)
            if split is not None:
                found.setdefault(split, []).append(file)
        if found:
            return found
    return {"train": files}


def _of_shard(file: PurePath) -> str | None:
    found = _SHARD.fullmatch(file.as_posix())
    return found[1] if found else None


def _of_folders(file: PurePath) -> str | None:
    return next((split for name in file.parts[:-1] if (split := split_in_name(name))), None)


def _of_file(file: PurePath) -> str | None:
    return split_in_name(file.name)
