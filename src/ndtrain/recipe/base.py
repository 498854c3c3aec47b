"""What all parts of a recipe share: frozen, no unknown keys, numbers as users write them."""

from types import NoneType
from typing import Any, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    model_validator,
)
from pydantic.fields import FieldInfo

MAX_SEED = 2**32 - 1
"""What every random generator takes."""


def accepts_null(field: FieldInfo) -> bool:
    """Whether `null` is a value of this key of its own, such as "no clipping"."""
    return NoneType in get_args(field.annotation) or field.annotation is Any


def mentions(annotation: Any, *wanted: type) -> bool:
    """Whether an annotation, or a part of it, is one of these types."""
    return annotation in wanted or any(mentions(arg, *wanted) for arg in get_args(annotation))


class RecipePart(BaseModel):
    """A frozen group of recipe keys; an unknown key is an error at every level."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        # A recipe inherits most of its parts: only the whole is ever built.
        defer_build=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _as_users_write(cls, data: Any) -> Any:
        """A key left empty (`wandb_project:`) means its default, as recipes in the wild expect;
        true and false are no numbers.
        """
        if not isinstance(data, dict):
            return data
        fields = cls.fields_by_key()
        return {
            key: _no_number_if_bool(value, fields.get(key))
            for key, value in data.items()
            if value is not None
            or key not in fields
            or fields[key].is_required()
            or accepts_null(fields[key])
        }

    @classmethod
    def fields_by_key(cls) -> dict[str, FieldInfo]:
        """The fields under the names that a recipe uses for them."""
        return {field.alias or name: field for name, field in cls.model_fields.items()}


def _no_number_if_bool(value: Any, field: FieldInfo | None) -> Any:
    """`max_steps: true` is a mistake; Python would count it as 1."""
    if field is None or not isinstance(value, bool):
        return value
    numeric = mentions(field.annotation, int, float) and not mentions(field.annotation, bool)
    # What no number can be read from: pydantic refuses it at the key.
    return object() if numeric else value


def _strategy_word(value: Any) -> Any:
    """YAML tools read an unquoted `no` as false; for a strategy both mean the word."""
    return "no" if value is False else value


StrategyWord = BeforeValidator(_strategy_word)

__all__ = ["MAX_SEED", "RecipePart", "StrategyWord", "accepts_null", "mentions"]
