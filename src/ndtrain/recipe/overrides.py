"""`--set KEY=VALUE`: values from the command line, laid over those of the file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ndtrain.errors import RecipeError
from ndtrain.recipe.document import Document, parse_value
from ndtrain.recipe.problem import KeyPath, Place, Problem, dotted, parse_dotted


@dataclass(frozen=True)
class Override:
    """One parsed flag."""

    path: KeyPath
    value: Any
    place: Place


def parse_override(flag: str, number: int) -> Override:
    """The override that `KEY=VALUE` asks for; `number` counts the flags from 1.

    Raises:
        RecipeError: it is not of that form, or the value is not YAML.
    """
    key, equals, text = flag.partition("=")
    path = parse_dotted(key.strip())
    if not equals or "" in path or isinstance(path[0], int):
        raise RecipeError(
            f"'{flag}' is not of the form KEY=VALUE.",
            where="--set",
            hint="Write for example `--set learning_rate=1e-5` or `--set datasets.0.path=a.jsonl`.",
        )
    where = f"--set {dotted(path)}"
    return Override(path, parse_value(text, where), Place(number, 0, 0, where))


def apply_overrides(document: Document, flags: Sequence[str]) -> None:
    """Lay the flags over the document's values; what is wrong with them joins its problems."""
    for number, flag in enumerate(flags, start=1):
        try:
            override = parse_override(flag, number)
        except RecipeError as error:
            place = Place(number, 0, 0, error.where)
            document.problems.append(Problem((), error.message, error.hint, place=place))
            continue
        problem = _apply(document, override)
        if problem:
            document.problems.append(problem)


def _apply(document: Document, override: Override) -> Problem | None:
    """Set one value, making the mappings on the way; a problem when the way does not exist."""
    holder: Any = document.data
    slot: Any
    for depth, part in enumerate(override.path):
        here = override.path[:depth]
        is_last = depth == len(override.path) - 1
        if isinstance(holder, list):
            if not isinstance(part, int) or part > len(holder):
                return Problem(
                    override.path,
                    f"'{dotted(here)}' is a list of {len(holder)}; '{part}' is not a place in it.",
                    f"Use a number from 0 to {len(holder)}.",
                    place=override.place,
                )
            if part == len(holder):
                holder.append(None)
            slot = part
        elif isinstance(holder, dict):
            slot = str(part)
        else:
            return Problem(
                override.path,
                f"'{dotted(here)}' is a single value and has no '{part}' inside.",
                place=override.place,
            )
        if is_last:
            holder[slot] = override.value
            break
        current = holder[slot] if isinstance(holder, list) else holder.get(slot)
        if current is None:
            current = [] if isinstance(override.path[depth + 1], int) else {}
            holder[slot] = current
        holder = current
    document.forget(override.path)
    for length in range(1, len(override.path)):
        document.spots.setdefault(override.path[:length], override.place)
    document.spots[override.path] = override.place
    return None
