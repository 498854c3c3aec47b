"""`ndtrain validate --from axolotl`: what becomes of every key of a foreign recipe."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ndtrain.recipe.document import parse_document, read_text
from ndtrain.recipe.load import examine
from ndtrain.recipe.overrides import apply_overrides
from ndtrain.recipe.problem import KeyPath, Place, Places, Problem, dotted
from ndtrain.recipe.variables import SOURCE_KEYS

Verdict = Literal["same", "adapted", "stops"]


@dataclass(frozen=True)
class KeyReport:
    """One key of the foreign recipe.

    Attributes:
        verdict: `same` meaning here; `adapted`: renamed or not needed; `stops`: must be changed.
        text: what to know or do; empty for `same`.
    """

    where: str
    key: str
    verdict: Verdict
    text: str


def report_axolotl(path: Path, overrides: Sequence[str] = ()) -> list[KeyReport]:
    """Every key of the file in order, with its verdict; problems between keys come where they are.

    Raises:
        RecipeError: the file cannot be read as YAML.
    """
    document = parse_document(read_text(path), str(path))
    apply_overrides(document, overrides)
    written = list(_keys(document.data, ()))
    spots = dict(document.spots)
    _, found = examine(document)
    places = Places(str(path), {**document.spots, **spots})
    told = {problem.path for problem in found}
    rows: list[tuple[Place, KeyReport]] = [
        (places.find(key), KeyReport(places.where(places.find(key)), dotted(key), "same", ""))
        for key in written
        if not any(other[: len(key)] == key for other in told)
    ]
    rows += [_row(problem, places) for problem in found]
    return [row for _, row in sorted(rows, key=lambda pair: (pair[0], pair[1].key))]


def _row(problem: Problem, places: Places) -> tuple[Place, KeyReport]:
    place = problem.place or places.find(problem.path)
    text = f"{problem.message} {problem.hint}".strip()
    verdict: Verdict = "adapted" if problem.is_notice else "stops"
    return place, KeyReport(places.where(place), dotted(problem.path), verdict, text)


def _keys(data: Mapping[str, Any], path: KeyPath) -> Iterator[KeyPath]:
    """The keys as written: top level, and those of each dataset."""
    for key, value in data.items():
        if key in SOURCE_KEYS and isinstance(value, list):
            for number, source in enumerate(value):
                if isinstance(source, dict):
                    yield from ((*path, key, number, name) for name in source)
        else:
            yield (*path, key)
