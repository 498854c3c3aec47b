"""Where a key stands and what is wrong with it."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ndtrain.errors import RecipeError

KeyPath = tuple[str | int, ...]
"""The way to a value from the top of the recipe, e.g. `("datasets", 0, "path")`."""


def dotted(path: KeyPath) -> str:
    """The path as users read it: `datasets[0].path`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def parse_dotted(text: str) -> KeyPath:
    """The path of `datasets[0].path` or `datasets.0.path`; empty parts are kept as they are."""
    parts = re.sub(r"\[(\d+)\]", r".\1", text).split(".")
    return tuple(int(part) if part.isascii() and part.isdigit() else part for part in parts)


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` is most likely a misspelling or a part of."""
    known = list(choices)
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    if found:
        return found[0]
    longer = [one for one in known if one.startswith(f"{word}_") or one.endswith(f"_{word}")]
    return longer[0] if len(longer) == 1 else None


@dataclass(frozen=True, order=True)
class Place:
    """A spot in the recipe file, or the command-line flag that a value came from.

    Flags sort behind the file; among themselves in the order in which they were given.
    """

    flag_number: int
    line: int
    column: int
    flag: str = ""

    @staticmethod
    def in_file(line: int, column: int) -> "Place":
        """A spot in the file, both numbers counted from 1."""
        return Place(0, line, column)


TOP = Place.in_file(1, 1)


@dataclass(frozen=True)
class Problem:
    """Something wrong with one key, before it is known where that key stands.

    Attributes:
        also: further keys that take part in it; none of them may be broken in another way.
        is_notice: worth saying, but no reason to stop.
        place: the exact spot, where that is not the place of the key.
    """

    path: KeyPath
    message: str
    hint: str = ""
    also: tuple[str, ...] = ()
    is_notice: bool = False
    place: Place | None = None

    @property
    def keys(self) -> frozenset[str]:
        """The top-level keys that take part."""
        return frozenset((str(self.path[0]), *self.also)) if self.path else frozenset(self.also)


@dataclass(frozen=True)
class Places:
    """Where each value of a recipe was written."""

    file: str
    spots: Mapping[KeyPath, Place] = field(default_factory=dict)

    def find(self, path: KeyPath) -> Place:
        """The place of the key, or of the nearest one around it that was written down."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.spots:
                return self.spots[path[:length]]
        return TOP

    def where(self, place: Place) -> str:
        """The place as users read it: `recipe.yaml:7:5` or `--set a.b`."""
        return place.flag or f"{self.file}:{place.line}:{place.column}"

    def locate(self, problem: Problem) -> tuple[Place, RecipeError]:
        """The problem as an error with its place."""
        place = problem.place or self.find(problem.path)
        key = dotted(problem.path)
        # a flag's place is its key
        key = f"{key}: " if key and place.flag != f"--set {key}" else ""
        error = RecipeError(key + problem.message, where=self.where(place), hint=problem.hint)
        return place, error

    def report(self, problems: Iterable[Problem]) -> list[RecipeError]:
        """The problems as errors, sorted by place, each said once."""
        located = sorted(
            (self.locate(problem) for problem in problems), key=lambda pair: (pair[0], str(pair[1]))
        )
        return list({str(error): error for _, error in located}.values())


def unknown_word(path: KeyPath, word: str, known: tuple[str, ...]) -> Problem | None:
    """A problem when `word` is none of the known ones."""
    if word in known:
        return None
    close = nearest(word, known)
    meant = f"; did you mean '{close}'?" if close else "."
    return Problem(path, f"'{word}' is unknown{meant}", f"Known: {', '.join(known)}.")


def both_given(key: str, other: str) -> Problem:
    """Two keys that exclude each other."""
    return Problem(
        (key,),
        f"excludes {other}, which is given too.",
        f"Remove one (`--set {key}=null` on the command line).",
        also=(other,),
    )
