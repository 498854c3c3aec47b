"""Rules of the optimizer's arguments and of the patterns that name parameters."""

import re
from collections.abc import Iterator

from ndtrain.recipe.problem import KeyPath, Problem, nearest
from ndtrain.recipe.schema import Recipe
from ndtrain.recipe.words import OPTIMIZER_ARGS

_OWN_KEYS = {
    "lr": "learning_rate",
    "betas": "adam_beta1 and adam_beta2",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
}
_BY_NAME = ("fused", "foreach")


def optim_args_are_known(recipe: Recipe) -> Problem | None:
    """`optim_args` are arguments of the optimizer that have no key of their own."""
    known = OPTIMIZER_ARGS.get(recipe.optimizer)
    if known is None:
        return None
    for name in recipe.optim_args:
        if name in known:
            continue
        if name in _OWN_KEYS and (name != "eps" or "adam" in recipe.optimizer):
            hint = f"Use the key {_OWN_KEYS[name]}."
        elif name in _BY_NAME:
            hint = "The optimizer's name says it: adamw_torch_fused or adamw_torch."
        else:
            near = nearest(name, known)
            hint = f"Did you mean '{near}'?" if near else f"Known: {', '.join(known) or 'none'}."
        return Problem(
            ("optim_args", name), f"{recipe.optimizer} takes no such argument here.", hint
        )
    return None


def patterns_can_be_read(recipe: Recipe) -> Problem | None:
    """What names parameters by a regular expression is one."""
    for path, pattern in _patterns(recipe):
        try:
            re.compile(pattern)
        except re.error as error:
            return Problem(
                path,
                f"'{pattern}' is not a regular expression: {error}.",
                "Put a backslash before signs that are meant as such.",
            )
    return None


def _patterns(recipe: Recipe) -> Iterator[tuple[KeyPath, str]]:
    for number, pattern in enumerate(recipe.unfrozen_parameters):
        yield ("unfrozen_parameters", number), pattern
    for place, group in enumerate(recipe.lr_groups):
        for number, pattern in enumerate(group.modules):
            yield ("lr_groups", place, "modules", number), pattern
    if isinstance(recipe.lora_target_modules, str):
        yield ("lora_target_modules",), recipe.lora_target_modules
