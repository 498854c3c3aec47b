"""From a recipe's datasets to prepared token rows: once for each content, then found ready."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from ndtrain.data.build import CONTENTS, Progress, build, local_paths
from ndtrain.data.cache import build_once, content_key
from ndtrain.data.parts import Placed, find_parts, split_seed
from ndtrain.data.report import DataReport
from ndtrain.data.token_rows import Moved, RowStore, TokenRows
from ndtrain.environment import cache_dir as user_cache
from ndtrain.recipe.schema import Recipe


@dataclass(frozen=True)
class Prepared:
    """Token rows of a recipe, mapped into memory.

    Attributes:
        path: the folder they lie in; every rank opens it for itself.
        evals: evaluation rows by the name of their dataset.
    """

    path: Path
    train: TokenRows
    evals: Mapping[str, TokenRows]
    report: DataReport


def prepared_dir(recipe: Recipe) -> Path:
    """The folder that prepared rows are kept in: the recipe's own, else the user's cache."""
    if recipe.dataset_prepared_path:
        return Path(recipe.dataset_prepared_path).expanduser()
    return user_cache() / "prepared"


def prepare(
    recipe: Recipe | Placed,
    tokenizer: PreTrainedTokenizerBase,
    tokenizer_key: str,
    cache_dir: Path | None = None,
    on_progress: Progress | None = None,
    *,
    data_ranks: int = 1,
) -> Prepared:
    """Tokenise a recipe's datasets, or find them tokenised.

    Runs before any process group exists. Concurrent callers build the same rows only once.

    Args:
        recipe: the recipe; a loaded one lets messages name the line of a key.
        tokenizer_key: identifies the tokenizer's behaviour.
        cache_dir: folder of prepared rows, with one folder for each content; default:
            `prepared_dir`.
        data_ranks: ranks that read different rows; bounds what is read of a text stream when
            the recipe does not give `global_batch_size`.

    Raises:
        DataError: a row is broken, or a dataset has nothing to train.
        RecipeError: a dataset, format or template is not found.
        CheckpointError: the cache cannot be written.
    """
    bare = recipe if isinstance(recipe, Recipe) else recipe.recipe
    position = (lambda key: key) if isinstance(recipe, Recipe) else recipe.position
    parts = find_parts(bare, tokenizer, position, _stream_tokens(bare, data_ranks))
    key = content_key(
        {
            "tokenizer": tokenizer_key,
            "parts": [part.ingredients for part in parts],
            "val_set_size": bare.val_set_size,
            "deduplicate": bare.dataset_exact_deduplication,
            "packed": bare.sample_packing,
            "seed": split_seed(bare),
        }
    )
    folder = (cache_dir or prepared_dir(bare)) / key
    tell: Progress = on_progress or (lambda stage, done, total: None)
    cached = build_once(folder, lambda path: build(path, parts, bare, tell))
    prepared = open_prepared(folder, local_paths(parts))
    return replace(prepared, report=replace(prepared.report, cached=cached))


def open_prepared(path: Path, files_here: Sequence[str] = ()) -> Prepared:
    """Map prepared rows into memory.

    Args:
        path: their folder.
        files_here: where the files with their content lie now; rows that were prepared from a
            copy elsewhere are named by these. Empty: as they were.
    """
    contents = json.loads((path / CONTENTS).read_text(encoding="utf-8"))
    moved = Moved(tuple(zip(contents.get("paths", ()), files_here, strict=False)))
    store = RowStore([path / name for name in contents["files"]], moved)
    report = DataReport.from_json(contents["report"])
    sources = tuple(
        replace(source, examples={why: moved.place(at) for why, at in source.examples.items()})
        for source in report.sources
    )
    return Prepared(
        path=path,
        train=TokenRows(store, np.load(path / contents["train"])),
        evals={
            name: TokenRows(store, np.load(path / file)) for name, file in contents["evals"].items()
        },
        report=replace(report, sources=sources),
    )


def _stream_tokens(recipe: Recipe, data_ranks: int) -> int | None:
    """The tokens of a text stream that the run's steps can use; None without such a bound."""
    if not recipe.pretraining_dataset or recipe.max_steps is None:
        return None
    rows = recipe.global_batch_size or (
        recipe.micro_batch_size * (recipe.gradient_accumulation_steps or 1) * data_ranks
    )
    return recipe.max_steps * rows * recipe.sequence_len
