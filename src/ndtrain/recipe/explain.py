"""Pydantic's findings in the words of a recipe: which key, what was expected, what was meant."""

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ndtrain.recipe.axolotl import foreign_dataset_keys, foreign_keys
from ndtrain.recipe.axolotl_keys import ELSEWHERE
from ndtrain.recipe.base import RecipePart, mentions
from ndtrain.recipe.problem import KeyPath, Problem, nearest
from ndtrain.recipe.schema import Recipe
from ndtrain.recipe.variables import SOURCE_KEYS

_MISSING = object()
_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
}


def explain(error: ValidationError, data: Mapping[str, Any]) -> list[Problem]:
    """The problems that pydantic found in `data`, each key once."""
    kinds: dict[KeyPath, str] = {}
    details: dict[KeyPath, str] = {}
    for found in error.errors(include_url=False, include_input=False):
        path = _path_in(found["loc"], data, found["type"])
        kinds.setdefault(path, found["type"])
        details.setdefault(path, found["msg"].removeprefix("Value error, "))
    unknown = {path for path, kind in kinds.items() if kind == "extra_forbidden"}
    meant = {(*path[:-1], suggestion(path)) for path in unknown}
    problems = []
    for path, kind in kinds.items():
        if kind == "extra_forbidden":
            problems.append(Problem(path, unknown_key(path)))
        elif kind == "missing":
            if path not in meant:
                problems.append(_missing(path))
        elif not any(other[: len(path)] == path for other in kinds if len(other) > len(path)):
            problems.append(_wrong_value(path, value_at(data, path), details[path]))
    return problems


def unknown_key(path: KeyPath) -> str:
    """What to say of a key that no part of a recipe knows at this level."""
    name = str(path[-1])
    if len(path) == 1 and name in ELSEWHERE:
        tool, ours = ELSEWHERE[name]
        return f"unknown key; {tool}'s '{name}' is '{ours}' here."
    found = suggestion(path)
    if found:
        return f"unknown key; did you mean '{found}'?"
    for place, key in _all_keys(Recipe, ""):
        if key == name and place + key != name:
            return f"unknown key here; it belongs to '{place.rstrip('.')}'."
    if len(path) > 1 and name in Recipe.fields_by_key():
        return "unknown key here; it belongs to the top level."
    around = " --field " + ".".join(str(step) for step in path[:-1] if isinstance(step, str))
    return f"unknown key. `ndtrain schema{around if len(path) > 1 else ''}` lists the known ones."


def suggestion(path: KeyPath) -> str | None:
    """The key of the same level that this one is most likely a misspelling of."""
    part, name = part_at(path[:-1]), str(path[-1])
    if part is None:
        return None
    foreign = foreign_keys() if part is Recipe else frozenset[str]()
    if path[0] in SOURCE_KEYS:
        foreign = foreign_dataset_keys()
    return nearest(name, [*part.fields_by_key(), *sorted(foreign)])


def part_at(path: KeyPath) -> type[RecipePart] | None:
    """The group of keys that a mapping at `path` is made of."""
    part: type[RecipePart] | None = Recipe
    for step in path:
        if isinstance(step, int):
            continue
        field = part.fields_by_key().get(step) if part else None
        part = next(_parts_in(field.annotation), None) if field else None
    return part


def field_at(path: KeyPath) -> FieldInfo | None:
    """The field that the key at `path` fills; items of a list belong to the list's field."""
    names = [step for step in path if isinstance(step, str)]
    for length in range(len(names), 0, -1):
        part = part_at(tuple(names[: length - 1]))
        field = part.fields_by_key().get(names[length - 1]) if part else None
        if field:
            return field
    return None


def expected(field: FieldInfo) -> str:
    """What a field takes, in words: `a whole number of at least 1`."""
    return _describe(field.annotation, tuple(field.metadata))


def describe_default(field: FieldInfo) -> str:
    """The default of a field in words: `required`, `unset`, `empty` or the value."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple) and value:
        return f"[{', '.join(map(str, value))}]"
    return "empty" if value in ((), {}, "") else str(value)


def value_at(data: Any, path: KeyPath) -> Any:
    """The value at `path`, or a marker when there is none."""
    for step in path:
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            return _MISSING
    return data


def _path_in(loc: tuple[str | int, ...], data: Mapping[str, Any], kind: str) -> KeyPath:
    """Pydantic's location without the names of union members, which no user wrote."""
    path: list[str | int] = []
    here: Any = data
    for step in loc:
        if _holds(here, step):
            here = here[step]
        elif kind == "missing" and step == loc[-1]:
            path.append(step)
            break
        else:
            continue
        path.append(step)
    return tuple(path)


def _holds(value: Any, step: str | int) -> bool:
    if isinstance(value, dict):
        return step in value
    return isinstance(value, list) and isinstance(step, int) and step < len(value)


def _missing(path: KeyPath) -> Problem:
    field = field_at(path)
    what = f" ({expected(field)}: {(field.description or '').rstrip('.').lower()})" if field else ""
    return Problem(path, f"this required key is missing{what}.")


def _wrong_value(path: KeyPath, value: Any, detail: str) -> Problem:
    field = field_at(path)
    if field is None or value is _MISSING:
        return Problem(path, f"{detail}.")
    shown = "nothing" if value is None else f"'{_short(value)}'"
    wanted = _item_of(field.annotation) if isinstance(path[-1], int) else None
    if isinstance(path[-1], str) and part_at(path[:-1]) is None:  # under a key of one's own
        wanted = _value_of(field.annotation)
    message = f"expected {_describe(wanted) if wanted else expected(field)}, not {shown}"
    words = [word for word in _literals(field.annotation) if isinstance(word, str)]
    close = nearest(value, words) if isinstance(value, str) else None
    return Problem(path, f"{message}; did you mean '{close}'?" if close else f"{message}.")


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _describe(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    options = list(_options(annotation, metadata))
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


def _options(annotation: Any, metadata: tuple[Any, ...]) -> Iterator[str]:
    """The single things that a field takes, a word or phrase each."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from (f"'{word}'" for word in args)
    elif annotation is bool:
        yield from ("true", "false")
    elif origin is tuple:
        yield f"a list of {_plural(args[0])}"
    elif origin is dict or (isinstance(annotation, type) and issubclass(annotation, RecipePart)):
        yield "a mapping"
    elif hasattr(annotation, "__metadata__"):
        yield from _options(args[0], (*metadata, *annotation.__metadata__))
    elif args:
        for arg in args:
            if arg is not NoneType:
                yield from _options(arg, metadata)
    else:
        limits = _limits(metadata) if annotation in (int, float) else ""
        yield _WORDS.get(annotation, "a value") + limits


def _item_of(annotation: Any) -> Any:
    """What the items of a list are; None when the annotation holds no list."""
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0]
    found = (_item_of(arg) for arg in get_args(annotation))
    return next((item for item in found if item is not None), None)


def _value_of(annotation: Any) -> Any:
    """What the values of a mapping are; None when the annotation holds no mapping."""
    if get_origin(annotation) is dict:
        return get_args(annotation)[1]
    found = (_value_of(arg) for arg in get_args(annotation))
    return next((value for value in found if value is not None), None)


def _limits(metadata: tuple[Any, ...]) -> str:
    words = []
    for limit in metadata:
        if isinstance(limit, Ge):
            words.append(f"of at least {limit.ge}")
        elif isinstance(limit, Gt):
            words.append(f"above {limit.gt}")
        elif isinstance(limit, Le):
            words.append(f"up to {limit.le}")
        elif isinstance(limit, Lt):
            words.append(f"below {limit.lt}")
    return " " + " and ".join(words) if words else ""


def _plural(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, RecipePart):
        return "mappings"
    return {"text": "texts", "a number": "numbers"}.get(_describe(annotation), "values")


def _literals(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for arg in get_args(annotation):
            yield from _literals(arg)


def _parts_in(annotation: Any) -> Iterator[type[RecipePart]]:
    if isinstance(annotation, type) and issubclass(annotation, RecipePart):
        yield annotation
    for arg in get_args(annotation):
        yield from _parts_in(arg)


def _all_keys(part: type[RecipePart], place: str) -> Iterator[tuple[str, str]]:
    """Every key of a recipe with the place it belongs to, top level first."""
    for key in part.fields_by_key():
        yield place, key
    for key, field in part.fields_by_key().items():
        for inner in _parts_in(field.annotation):
            yield from _all_keys(inner, f"{place}{key}.")


def takes_text(field: FieldInfo) -> bool:
    """Whether the field, or one item of its list, may be text."""
    return mentions(field.annotation, str)
