"""Writes the prepared rows of a recipe's datasets, which rows make up each set, and the counts."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ndtrain.data import encode
from ndtrain.data.encode import Chunk
from ndtrain.data.mix import mix_rows, split_rows
from ndtrain.data.pack import pack
from ndtrain.data.parts import VALIDATION, Part, split_seed
from ndtrain.data.report import UNKNOWN_ROLE, DataReport, SourceReport
from ndtrain.data.sources import Files
from ndtrain.data.token_rows import Index, RowStore, RowWriter
from ndtrain.data.tokens import Ids
from ndtrain.data.workers import encode_all, num_processes
from ndtrain.errors import DataError
from ndtrain.recipe.schema import Recipe

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, rows done, and rows in all when that is known."""

CONTENTS = "prepared.json"
TRAIN = "train.npy"
_DROPPED = (encode.BAD_ROW, encode.TOO_LONG, encode.TOO_SHORT, encode.NOTHING_TRAINED)
_CHANGED = (encode.TRUNCATED, encode.SPLIT, encode.PREFERENCE)
_WARNINGS = (encode.TWO_STARTS, encode.TWO_ENDS, encode.NO_END, encode.SPLIT_END)

_MOST_ROLES = 5
"""Unknown roles that are told of."""


@dataclass
class _Written:
    """What writing one part has counted."""

    report: SourceReport
    lengths: Ids


@dataclass(frozen=True)
class _Selected:
    """Row numbers of the training set and, apart from it, of each evaluation set by its name."""

    train: Index
    evals: Mapping[str, Index]


def build(folder: Path, parts: Sequence[Part], recipe: Recipe, tell: Progress) -> None:
    """Write rows, selections and report into an empty folder.

    Raises:
        DataError: a row is broken, or a dataset has nothing to train.
    """
    files: list[str] = []
    written: list[_Written] = []
    ranges: list[Index] = []
    seen: set[bytes] = set()
    total = 0
    for number, part in enumerate(parts):
        name = f"rows-{number:03}.arrow"
        digests = seen if part.eval_name is None else set()
        result = _write_part(folder / name, part, recipe, digests, tell)
        files.append(name)
        written.append(result)
        ranges.append(np.arange(total, total + result.report.rows_used, dtype=np.int64))
        total += result.report.rows_used
    selected = _select(parts, ranges, recipe)
    lengths = np.concatenate([result.lengths for result in written])
    taken = _count_taken(parts, ranges, selected)
    report = _report(written, taken, selected, lengths, RowStore([folder / name for name in files]))
    if recipe.sample_packing:
        packing = pack(lengths[selected.train], recipe.sequence_len)
        fill = report.tokens / (len(packing) * recipe.sequence_len)
        report = replace(report, packed_rows=len(packing), fill=fill)
    np.save(folder / TRAIN, selected.train)
    evals: dict[str, str] = {}
    for number, (name, index) in enumerate(selected.evals.items()):
        evals[name] = f"eval-{number:03}.npy"
        np.save(folder / evals[name], index)
    contents = {
        "files": files,
        "train": TRAIN,
        "evals": evals,
        "report": report.to_json(),
        "paths": local_paths(parts),
    }
    (folder / CONTENTS).write_text(json.dumps(contents, indent=1), encoding="utf-8")


def local_paths(parts: Sequence[Part]) -> list[str]:
    """The local files of all parts, in order; equal contents have equally many."""
    return [
        str(path) for part in parts if isinstance(part.source, Files) for path in part.source.paths
    ]


def _write_part(
    path: Path, part: Part, recipe: Recipe, seen: set[bytes], tell: Progress
) -> _Written:
    """Encode one dataset into one file."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    lengths: list[Ids] = []
    rows_in = tokens = trained = duplicates = 0
    stage = f"Tokenising {part.spec.path}"
    processes = num_processes(recipe.dataset_num_proc)
    chunks = encode_all(part.rows(), part.encoder, processes)
    with RowWriter(path) as writer, closing(chunks):
        for chunk in chunks:
            keep, repeated = _unique(chunk, seen, recipe.dataset_exact_deduplication)
            chunk_lengths, chunk_targets = writer.write(chunk, keep)
            lengths.append(chunk_lengths)
            tokens += int(chunk_lengths.sum())
            trained += int(chunk_targets.sum())
            duplicates += repeated
            counts += chunk.counts
            examples = {**chunk.examples, **examples}
            rows_in += chunk.rows_in
            tell(stage, rows_in, None)
            if part.max_tokens is not None and tokens >= part.max_tokens:
                break
        used = writer.rows
    report = SourceReport(
        path=part.spec.path,
        rows_in=rows_in,
        rows_used=used,
        rows_taken=used,
        tokens=tokens,
        trained_tokens=trained,
        duplicates=duplicates,
        dropped=_chosen(counts, _DROPPED),
        changed=_chosen(counts, _CHANGED),
        warnings=_chosen(counts, _WARNINGS) | _unknown_roles(counts),
        examples=examples,
    )
    if not used:
        raise _nothing_left(report)
    return _Written(report, np.concatenate(lengths))


def _unique(chunk: Chunk, seen: set[bytes], drop: bool) -> tuple[list[int], int]:
    """Rows of a chunk to keep, and how many had been seen before."""
    keep: list[int] = []
    repeated = 0
    for place, digest in enumerate(chunk.digests):
        if digest in seen:
            repeated += 1
            if drop:
                continue
        seen.add(digest)
        keep.append(place)
    return keep, repeated


def _chosen(counts: Counter[str], names: Sequence[str]) -> dict[str, int]:
    """The counts of some names that are not zero."""
    return {name: counts[name] for name in names if counts[name]}


def _unknown_roles(counts: Counter[str]) -> dict[str, int]:
    """The commonest roles that nobody knows; data may have a role for each person."""
    found = Counter({why: n for why, n in counts.items() if why.startswith(UNKNOWN_ROLE)})
    return dict(found.most_common(_MOST_ROLES))


def _nothing_left(report: SourceReport) -> DataError:
    """The refusal of a dataset without a usable row."""
    if not report.rows_in:
        return DataError("the dataset has no rows.", where=report.path)
    reasons = ", ".join(
        f"{number} {reason} (first: {report.examples[reason]})"
        for reason, number in report.dropped.items()
    )
    hint = "Check its type and the roles to train."
    if encode.TOO_LONG in report.dropped:
        hint = "Raise sequence_len, or set excess_length_strategy: truncate or split."
    for reason in report.warnings:
        if reason.startswith(UNKNOWN_ROLE):
            hint = f"There are rows {reason} (first: {report.examples[reason]})"
    reasons = reasons or f"all {report.duplicates} occur earlier"
    return DataError(
        f"none of the {report.rows_in} rows can be trained: {reasons}.",
        where=report.path,
        hint=hint,
    )


def _select(parts: Sequence[Part], ranges: Sequence[Index], recipe: Recipe) -> _Selected:
    """Row numbers of the training set and of each evaluation set."""
    train = [place for place, part in enumerate(parts) if part.eval_name is None]
    training = [ranges[place] for place in train]
    evals: dict[str, Index] = {}
    seed = split_seed(recipe)
    if recipe.val_set_size:
        everything = np.concatenate(training)
        kept, held = split_rows(len(everything), recipe.val_set_size, seed)
        evals[VALIDATION] = everything[held]
        remaining = everything[kept]
        training = [part[np.isin(part, remaining, assume_unique=True)] for part in training]
    mixed = mix_rows(training, [parts[place].spec for place in train], seed)
    for part, rows in zip(parts, ranges, strict=True):
        if part.eval_name is not None:
            evals[part.eval_name] = mix_rows([rows], [part.spec], seed)
    return _Selected(mixed, evals)


def _count_taken(parts: Sequence[Part], ranges: Sequence[Index], selected: _Selected) -> list[int]:
    """The rows that each part gives to the set it is for, repeated ones each time."""
    starts = [rows[0] for rows in ranges]
    training = np.searchsorted(starts, selected.train, side="right") - 1
    given = np.bincount(training, minlength=len(parts)).tolist()
    return [
        rows if part.eval_name is None else len(selected.evals[part.eval_name])
        for part, rows in zip(parts, given, strict=True)
    ]


def _report(
    written: Sequence[_Written],
    taken: Sequence[int],
    selected: _Selected,
    lengths: Ids,
    store: RowStore,
) -> DataReport:
    """Counts over the training selection."""
    train = selected.train
    chosen = lengths[train]
    longest = int(chosen.max())
    tops = [2**power for power in range(3, max(4, longest.bit_length() + 1))]
    filled = np.searchsorted(tops, chosen, side="left")
    histogram = [(top, int((filled == place).sum())) for place, top in enumerate(tops)]
    return DataReport(
        sources=tuple(
            replace(result.report, rows_taken=rows)
            for result, rows in zip(written, taken, strict=True)
        ),
        train_rows=len(train),
        eval_rows={name: len(rows) for name, rows in selected.evals.items()},
        tokens=int(chosen.sum()),
        trained_tokens=int(store.column("targets")[train].sum()),
        longest=longest,
        lengths=tuple((top, rows) for top, rows in histogram if rows),
    )
