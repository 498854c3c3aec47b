"""The model book: sizes of open models shipped with the program, for machines without a hub."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from ndtrain.plan.facts import ModelFacts, facts_from_config


@dataclass(frozen=True)
class BookEntry:
    """One model of the book.

    Attributes:
        model_id: its hub id.
        also: hub ids of models with the same sizes.
        parameters_b: published number of parameters in billions.
        config: the keys of its `config.json` that planning reads.
    """

    model_id: str
    also: tuple[str, ...]
    parameters_b: float
    config: Mapping[str, Any]


@cache
def book_entries() -> tuple[BookEntry, ...]:
    """All models of the book."""
    return tuple(
        BookEntry(row["id"], tuple(row["also"]), row["parameters_b"], row["config"])
        for row in _book()["models"]
    )


def book_date() -> str:
    """When the sizes were entered."""
    return str(_book()["date"])


def find_in_book(name: str) -> BookEntry | None:
    """The entry for a hub id, or for the last part of one; upper and lower case are alike."""
    wanted = name.strip().rstrip("/").lower()
    for entry in book_entries():
        if wanted in (known.lower() for known in (entry.model_id, *entry.also)):
            return entry
    last = wanted.rsplit("/", 1)[-1]
    for entry in book_entries():
        if last in (known.lower().rsplit("/", 1)[-1] for known in (entry.model_id, *entry.also)):
            return entry
    return None


def close_in_book(name: str) -> str | None:
    """The hub id of the book that is written most like a name, None where none is close."""
    wanted = name.lower().rsplit("/", 1)[-1]
    ids = [known for entry in book_entries() for known in (entry.model_id, *entry.also)]
    by_last = {known.lower().rsplit("/", 1)[-1]: known for known in reversed(ids)}
    # A maker's name before the model's is no other model.
    longer = sorted(
        (last for last in by_last if last.endswith(f"-{wanted}") and len(last) < 2 * len(wanted)),
        key=len,
    )
    close = longer or get_close_matches(wanted, by_last, n=1, cutoff=0.8)
    return by_last[close[0]] if close else None


def facts_from_book(name: str) -> ModelFacts | None:
    """The sizes of a model by its hub id, None when the book does not have it."""
    entry = find_in_book(name)
    if entry is None:
        return None
    return facts_from_config(entry.config, name=name, source="book")


@cache
def _book() -> Mapping[str, Any]:
    text = (files("ndtrain.plan") / "model_book.json").read_text(encoding="utf-8")
    book: Mapping[str, Any] = json.loads(text)
    return book
