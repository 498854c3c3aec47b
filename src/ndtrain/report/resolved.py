"""`resolved.yaml`: every value of a recipe with where it came from, itself a valid recipe."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from ndtrain.recipe.schema import Recipe

_PLAIN_WORD = re.compile(r"[A-Za-z_./][A-Za-z0-9_./+-]*")
# Words that some YAML reader takes for a boolean, null or a float.
_SPOKEN_FOR = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", ".inf", ".nan"}


def render_resolved(recipe: Recipe, origins: Mapping[str, str]) -> str:
    """The recipe as YAML, one value a line, its origin behind it.

    Args:
        recipe: what runs.
        origins: dotted key (`datasets[0].path`) to `default`, `file:line:col` or `--set`.
    """
    head = "# Every value of this run and where it came from. This file is itself a recipe.\n"
    values = recipe.model_dump(by_alias=True)
    return head + "".join(f"{line}\n" for line in _mapping_lines(values, "", "", origins))


def _mapping_lines(
    values: Mapping[str, Any], key: str, indent: str, origins: Mapping[str, str]
) -> Iterator[str]:
    for name, value in values.items():
        head = f"{indent}{_scalar(name)}:"
        yield from _entry_lines(head, value, _join(key, name), indent, origins)


def _entry_lines(
    head: str, value: Any, key: str, indent: str, origins: Mapping[str, str]
) -> Iterator[str]:
    """`head` is everything up to the value: `name:` or `-`."""
    origin = f"  # {_origin(key, origins)}"
    if isinstance(value, Mapping) and value:
        inside = _mapping_lines(value, key, indent + "  ", origins)
        if head.endswith("-"):
            # The first key of an item stands behind its dash.
            yield f"{head} {next(inside).lstrip()}"
        else:
            yield head + origin
        yield from inside
    elif isinstance(value, list | tuple) and value:
        yield head + origin
        for place, part in enumerate(value):
            yield from _entry_lines(f"{indent}  -", part, f"{key}[{place}]", indent + "  ", origins)
    else:
        yield f"{head} {_scalar(value)}{origin}"


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _origin(key: str, origins: Mapping[str, str]) -> str:
    """The origin of the key, else of the part it stands in, if that was set as a whole.

    Where other keys of the same part are listed, one that is not was left at its default.
    """
    if key in origins:
        return origins[key]
    above = re.sub(r"(\.[^.\[\]]+|\[\d+\])$", "", key)
    if above == key or any(one.startswith((f"{above}.", f"{above}[")) for one in origins):
        return "default"
    return _origin(above, origins)


def _scalar(value: Any) -> str:
    """A value on one line that every YAML reader takes for what it is."""
    if isinstance(value, str):
        if _PLAIN_WORD.fullmatch(value) and value.lower() not in _SPOKEN_FOR:
            return value
        return _dumped(value, '"')
    if isinstance(value, tuple):
        value = list(value)
    return _dumped(value, None)


def _dumped(value: Any, style: str | None) -> str:
    text = yaml.safe_dump(
        value,
        default_style=style,
        default_flow_style=True,
        allow_unicode=True,
        width=2**31,
    )
    return str(text).removesuffix("...\n").strip("\n")
