"""The recipe's JSON schema for editors, and one key explained for the terminal."""

from typing import Any

from ndtrain.errors import RecipeError
from ndtrain.recipe.explain import describe_default, expected, field_at, part_at, unknown_key
from ndtrain.recipe.problem import dotted, parse_dotted
from ndtrain.recipe.schema import Recipe


def recipe_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of a recipe, keys sorted as the groups declare them."""
    schema = Recipe.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def describe_key(key: str) -> str:
    """What a key means, takes and defaults to; for a group, the same of each key inside.

    Raises:
        RecipeError: there is no such key.
    """
    path = tuple(step for step in parse_dotted(key) if isinstance(step, str))
    owner = part_at(path[:-1])
    if not path or owner is None or path[-1] not in owner.fields_by_key():
        text = unknown_key(path or (key,))
        raise RecipeError(text, where=f"--field {key}")
    lines = _describe(dotted(path))
    inner = part_at(path)
    for name in inner.fields_by_key() if inner else ():
        lines += ["", *_describe(f"{dotted(path)}.{name}")]
    return "\n".join(lines)


def _describe(key: str) -> list[str]:
    field = field_at(parse_dotted(key))
    if field is None:
        return [key]
    default = describe_default(field)
    shown = default if field.is_required() else f"default: {default}"
    return [f"{key}: {expected(field)} ({shown})", f"  {field.description or ''}".rstrip()]
