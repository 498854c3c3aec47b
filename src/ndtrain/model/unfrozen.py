"""Which parameters of the base are trained: all, or those that the recipe's patterns match."""

import re
from collections.abc import Sequence

from torch import nn

from ndtrain.errors import RecipeError


def matching_parameters(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    """The parameters, by name, in which one of the regular expressions is found.

    Args:
        model: with the names that its files use: before an adapter or a split renames modules.
        patterns: `unfrozen_parameters`.

    Raises:
        RecipeError: a pattern is none, or matches nothing.
    """
    named = dict(model.named_parameters())
    found: dict[str, nn.Parameter] = {}
    for pattern in patterns:
        try:
            matches = [name for name in named if re.search(pattern, name)]
        except re.error as error:
            raise RecipeError(
                f"{pattern!r} is not a regular expression: {error}.", where="unfrozen_parameters"
            ) from error
        if not matches:
            raise RecipeError(
                f"{pattern!r} matches no parameter.",
                where="unfrozen_parameters",
                hint=f"Parameters are named like {next(iter(named))!r}.",
            )
        found |= {name: named[name] for name in matches}
    return found


def freeze_unnamed(model: nn.Module, patterns: Sequence[str]) -> None:
    """Train only the parameters that one of the patterns matches.

    Raises:
        RecipeError: a pattern is none, or matches nothing.
    """
    trained = matching_parameters(model, patterns)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
