"""Optimizers, learning-rate schedules and parameter groups.

To add an optimizer, put its factory in `OPTIMIZERS`; the tests then hold it to the same result on
sharded tensors as on whole ones. A schedule is a pure function of the step, so that resuming
needs nothing but the step.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ndtrain.errors import RecipeError
from ndtrain.recipe.schema import Recipe
from ndtrain.recipe.words import LOW_BIT_OPTIMIZERS
from ndtrain.train.low_bit_adam import LowBitAdamW
from ndtrain.train.timetable import steps_of

OptimizerFactory = Callable[[list[dict[str, Any]], Recipe], Optimizer]


def _adam(kind: Callable[..., Optimizer], **options: Any) -> OptimizerFactory:
    def build(groups: list[dict[str, Any]], recipe: Recipe) -> Optimizer:
        return kind(
            groups,
            lr=recipe.learning_rate,
            betas=(recipe.adam_beta1, recipe.adam_beta2),
            eps=recipe.adam_epsilon,
            **{**options, **recipe.optim_args},
        )

    return build


def _plain(kind: Callable[..., Optimizer], **options: Any) -> OptimizerFactory:
    def build(groups: list[dict[str, Any]], recipe: Recipe) -> Optimizer:
        return kind(groups, lr=recipe.learning_rate, **{**options, **recipe.optim_args})

    return build


OPTIMIZERS: Mapping[str, OptimizerFactory] = {
    "adamw_torch_fused": _adam(torch.optim.AdamW, fused=True),
    "adamw_torch": _adam(torch.optim.AdamW, foreach=True),
    "adam": _adam(torch.optim.Adam, fused=True),
    "adamax": _adam(torch.optim.Adamax),
    "nadam": _adam(torch.optim.NAdam),
    "radam": _adam(torch.optim.RAdam),
    "sgd": _plain(torch.optim.SGD, momentum=0.9),
    "adagrad": _plain(torch.optim.Adagrad),
    "rmsprop": _plain(torch.optim.RMSprop),
}
"""Element-wise optimizers: their result does not depend on how a tensor is split."""


def _low_bit_adamw(groups: list[dict[str, Any]], recipe: Recipe) -> Optimizer:
    if recipe.optim_args:
        raise RecipeError(
            f"AdamW over bf16 weights or smaller states takes no {', '.join(recipe.optim_args)}.",
            where="optim_args",
            hint="Remove optim_args, or use fp32 for param_dtype and optimizer_state_dtype.",
        )
    return LowBitAdamW(
        groups,
        lr=recipe.learning_rate,
        betas=(recipe.adam_beta1, recipe.adam_beta2),
        eps=recipe.adam_epsilon,
        state_dtype=recipe.optimizer_state_dtype,
        seed=recipe.seed,
    )


def rounds_by_chance(recipe: Recipe, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether weights or states have too few bits to be rounded to the nearest number.

    Args:
        recipe: the optimizer and its states.
        dtypes: of the trained weights.
    """
    if recipe.optimizer not in LOW_BIT_OPTIMIZERS:
        return False
    return recipe.optimizer_state_dtype != "fp32" or torch.bfloat16 in set(dtypes)


def _constant(step: int, total: int, recipe: Recipe) -> float:
    return 1.0


def _linear(step: int, total: int, recipe: Recipe) -> float:
    return 1.0 - step / max(1, total)


def _cosine(step: int, total: int, recipe: Recipe) -> float:
    floor = recipe.cosine_min_lr_ratio
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / max(1, total))))


def _warmup_stable_decay(step: int, total: int, recipe: Recipe) -> float:
    decay = max(1, round(recipe.wsd_decay_ratio * total))
    return min(1.0, max(0.0, (total - step) / decay))


SCHEDULES: Mapping[str, Callable[[int, int, Recipe], float]] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _warmup_stable_decay,
}
"""Factor of the peak learning rate by steps since warm-up and their number."""


def learning_rate_factor(recipe: Recipe, step: int, total_steps: int) -> float:
    """Factor of the peak learning rate at a step.

    The warm-up rises linearly and reaches the peak at its last step, so that already the first
    step moves the weights.

    Args:
        recipe: schedule and warm-up.
        step: steps done before this one.
        total_steps: steps of the whole run.
    """
    warmup = recipe.warmup_steps
    if warmup is None:
        warmup = steps_of(recipe.warmup_ratio or 0.0, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    return SCHEDULES[recipe.lr_scheduler](step - warmup, total_steps - warmup, recipe)


def check_optimization(recipe: Recipe) -> None:
    """Refuse unknown optimizer and schedule names.

    Raises:
        RecipeError: names the ones that exist.
    """
    for key, known in (("optimizer", OPTIMIZERS), ("lr_scheduler", SCHEDULES)):
        name = getattr(recipe, key)
        if name not in known:
            raise RecipeError(
                f"unknown {key} {name!r}.", where=key, hint=f"Known: {', '.join(known)}."
            )


def _group_of(name: str, parameter: nn.Parameter, recipe: Recipe) -> tuple[float, float]:
    """Learning rate and weight decay of one parameter."""
    rate = recipe.learning_rate
    if recipe.loraplus_lr_ratio is not None and ".lora_B." in name:
        rate *= recipe.loraplus_lr_ratio
    if recipe.embedding_lr is not None and re.search(r"embed|lm_head", name):
        rate = recipe.embedding_lr
    for group in recipe.lr_groups:
        if any(re.search(pattern, name) for pattern in group.modules):
            rate = group.lr
    # norms and biases are scales and offsets: decaying them pulls the model towards nothing
    decay = recipe.weight_decay if parameter.ndim > 1 else 0.0
    return rate, decay


def optimizer_factory(recipe: Recipe, dtypes: Iterable[torch.dtype]) -> OptimizerFactory:
    """What builds the recipe's optimizer over parameters of some dtypes."""
    return _low_bit_adamw if rounds_by_chance(recipe, dtypes) else OPTIMIZERS[recipe.optimizer]


def build_optimizer(parameters: Iterable[tuple[str, nn.Parameter]], recipe: Recipe) -> Optimizer:
    """Build the recipe's optimizer over the trainable parameters.

    Its groups have `names` beside `params`, in the same order.

    Args:
        parameters: names and parameters; frozen ones are left out.
        recipe: optimizer, learning rates and decay.

    Raises:
        RecipeError: nothing is trainable, or an `lr_groups` pattern matches nothing.
    """
    check_optimization(recipe)
    groups: dict[tuple[float, float, int], list[tuple[str, nn.Parameter]]] = {}
    names = []
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        names.append(name)
        # one group per mesh: fused kernels take tensors of one mesh at a time
        mesh = hash(parameter.device_mesh) if isinstance(parameter, DTensor) else 0
        key = (*_group_of(name, parameter, recipe), mesh)
        groups.setdefault(key, []).append((name, parameter))
    if not names:
        raise RecipeError(
            "no parameter is trainable.", hint="Check adapter and unfrozen_parameters."
        )
    for number, group in enumerate(recipe.lr_groups):
        for pattern in group.modules:
            if not any(re.search(pattern, name) for name in names):
                raise RecipeError(
                    f"{pattern!r} matches no trainable parameter.",
                    where=f"lr_groups[{number}].modules",
                    hint=f"Parameters are named like {names[0]!r}.",
                )
    listed = [
        {
            "params": [parameter for _, parameter in members],
            "names": [name for name, _ in members],
            "lr": rate,
            "peak_lr": rate,
            "weight_decay": decay,
        }
        for (rate, decay, _), members in groups.items()
    ]
    dtypes = [parameter.dtype for members in groups.values() for _, parameter in members]
    return optimizer_factory(recipe, dtypes)(listed, recipe)


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Set every group's learning rate to its peak times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
