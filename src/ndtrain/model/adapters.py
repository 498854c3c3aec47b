"""Low-rank adapters through peft, put into a model before it is split and sharded.

The model stays a transformers model: adapted linears are replaced in place, so parameter names get
no prefix. Modules trained whole beside the adapters (`lora_modules_to_save`) are simply not frozen.
"""

import difflib
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ndtrain.errors import RecipeError
from ndtrain.model.lora import use_lora_linears
from ndtrain.model.quantised import Bits, QuantisedLinear, quantisable, quantise_linears
from ndtrain.model.unfrozen import matching_parameters
from ndtrain.recipe.schema import Recipe

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

_ALL_LINEAR = "all-linear"
_SHOWN = 12


@dataclass(frozen=True)
class TrainableReport:
    """How much of a model is trained.

    Attributes:
        total: parameters of the base and of what is trained beside it; a weight held in few bits
            counts as the weight it stands for.
        adapted: kinds of modules that have an adapter.
    """

    trainable: int
    total: int
    adapted: tuple[str, ...]


def apply_adapter(model: "PreTrainedModel", recipe: Recipe) -> "PreTrainedModel":
    """Put the recipe's adapter into `model` and freeze everything else, in place.

    Args:
        model: the plain model, usually on the meta device; not yet split or sharded.
        recipe: with `adapter` set.

    Raises:
        RecipeError: the targets match nothing, or peft does not know an option.
    """
    from peft import inject_adapter_in_model

    saved = whole_modules(model, recipe)
    trained = {id(one) for one in trained_whole(model, recipe)}
    targets = find_targets(model, recipe)
    _refuse_both(targets, saved)
    config = adapter_config(model, recipe, targets)
    if (bits := base_bits(recipe)) is not None:
        quantise_linears(model, quantised_names(model, recipe, bits), bits)
    with quiet_peft():
        inject_adapter_in_model(config, model)
    if recipe.peft_use_dora:
        from ndtrain.model.dora import use_mesh_dora

        use_mesh_dora(model)
    else:
        use_lora_linears(model)
    # set afterwards: peft would train a copy of each of them beside the original
    config.modules_to_save = shorten_saved(model, saved) or None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name or id(parameter) in trained)
        if parameter.requires_grad and parameter.dtype != torch.float32:
            # small updates would be lost in a lower precision
            parameter.data = parameter.data.to(torch.float32)
    return model


@contextmanager
def quiet_peft() -> Iterator[None]:
    """peft warns of tied heads; here an adapter on the head leaves the embedding alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        yield


def adapter_config(
    model: "PreTrainedModel", recipe: Recipe, targets: Sequence[str]
) -> "LoraConfig":
    """peft's configuration of the recipe's adapter.

    Args:
        model: the plain model.
        recipe: with `adapter` set.
        targets: full names of the adapted modules.
    """
    from peft import LoraConfig

    try:
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=recipe.lora_r,
            lora_alpha=_whole(recipe.lora_alpha),
            lora_dropout=recipe.lora_dropout,
            target_modules=shorten(model, targets),
            use_rslora=recipe.peft_use_rslora,
            use_dora=recipe.peft_use_dora,
            init_lora_weights=recipe.peft_init_lora_weights,
        )
    except (TypeError, ValueError) as error:
        raise RecipeError(f"peft refuses the adapter: {error}", where="adapter") from error


def base_bits(recipe: Recipe) -> Bits | None:
    """In how many bits the recipe holds its frozen base; None: whole.

    Raises:
        RecipeError: the adapter's kind needs the weights whole.
    """
    bits: Bits | None = 4 if recipe.load_in_4bit else 8 if recipe.load_in_8bit else None
    if bits is not None and recipe.peft_use_dora:
        raise RecipeError(
            f"DoRA measures whole weights, but the base is held in {bits} bits.",
            where="peft_use_dora",
            hint="Leave peft_use_dora away, or load the base in bf16.",
        )
    return bits


def quantised_names(model: "PreTrainedModel", recipe: Recipe, bits: Bits) -> list[str]:
    """The linears held in few bits: all but the head and what is trained whole."""
    keep = [model.get_submodule(name) for name in whole_modules(model, recipe)]
    return quantisable(model, bits, [model.get_output_embeddings(), *keep])


def find_targets(model: "PreTrainedModel", recipe: Recipe) -> list[str]:
    """Full names of the modules that get an adapter; what is trained whole is no linear of "all".

    Raises:
        RecipeError: a name or the pattern matches none; lists the linears that exist.
    """
    linears = linear_names(model)
    wanted = recipe.lora_target_modules
    if wanted is None or recipe.lora_target_linear or wanted == _ALL_LINEAR:
        head = model.get_output_embeddings()
        whole = whole_modules(model, recipe)
        chosen = [
            name for name in linears if model.get_submodule(name) is not head and name not in whole
        ]
        if not isinstance(wanted, tuple):
            return chosen
        return sorted({*chosen, *_match_names(model, linears, wanted)})
    if isinstance(wanted, str):
        return _match_pattern(model, linears, wanted)
    return _match_names(model, linears, wanted)


def linear_names(model: nn.Module) -> list[str]:
    """Full names of all linears."""
    return [name for name, module in model.named_modules() if _is_linear(module)]


def find_modules_to_save(model: nn.Module, wanted: Sequence[str]) -> list[str]:
    """Full names of the modules trained whole.

    Raises:
        RecipeError: a name matches no module.
    """
    names = [name for name, _ in model.named_modules() if name]
    found = []
    for word in wanted:
        matches = [name for name in names if name == word or name.endswith(f".{word}")]
        if not matches:
            leaves = sorted({name.rpartition(".")[2] for name in names})
            raise RecipeError(
                f"'{word}' matches no module.",
                where="lora_modules_to_save",
                hint=_suggest(word, leaves) or "Use e.g. embed_tokens or lm_head.",
            )
        found += matches
    return found


def whole_modules(model: nn.Module, recipe: Recipe) -> list[str]:
    """Full names of the modules that leave with the adapter because something in them is trained.

    Raises:
        RecipeError: a name or a pattern matches nothing.
    """
    owners = [
        name.rpartition(".")[0] for name in matching_parameters(model, recipe.unfrozen_parameters)
    ]
    return with_tied(model, [*find_modules_to_save(model, recipe.lora_modules_to_save), *owners])


def trained_whole(model: nn.Module, recipe: Recipe) -> list[nn.Parameter]:
    """The base's parameters that are trained beside the adapters."""
    named = find_modules_to_save(model, recipe.lora_modules_to_save)
    modules = [model.get_submodule(name) for name in with_tied(model, named)]
    matched = matching_parameters(model, recipe.unfrozen_parameters)
    return [*(one for module in modules for one in module.parameters()), *matched.values()]


def with_tied(model: nn.Module, modules: Sequence[str]) -> list[str]:
    """The modules and those that share a weight with one of them: both change together."""
    named = dict(model.named_modules())
    shared = {id(one) for name in modules for one in named[name].parameters()}
    return [
        name
        for name, module in named.items()
        if name in modules or any(id(one) in shared for one in module.parameters(recurse=False))
    ]


def shorten(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """The last parts of the names where they mean the same modules, else the full names."""
    leaves = {name.rpartition(".")[2] for name in targets}
    meant = {name for name in _adaptable(model) if name.rpartition(".")[2] in leaves}
    return sorted(leaves) if meant == set(targets) else sorted(targets)


def shorten_saved(model: nn.Module, saved: Sequence[str]) -> list[str]:
    """Names of modules trained whole; peft takes every module whose name ends like one of them."""
    leaves = {name.rpartition(".")[2] for name in saved}
    meant = {name for name, _ in model.named_modules() if name.endswith(tuple(leaves))}
    return sorted(leaves) if leaves and meant == set(saved) else sorted(saved)


def report_trainable(model: nn.Module) -> TrainableReport:
    """Count parameters; of DTensors the whole size."""
    sizes = {id(one): one.numel() for one in model.parameters()}
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            sizes[id(module.weight)] = module.in_features * module.out_features
            sizes[id(module.scales)] = 0
    adapted = {
        name.split(".lora_")[0].rpartition(".")[2]
        for name, _ in model.named_parameters()
        if ".lora_" in name
    }
    return TrainableReport(
        trainable=sum(sizes[id(one)] for one in set(model.parameters()) if one.requires_grad),
        total=sum(sizes.values()),
        adapted=tuple(sorted(adapted)),
    )


def _refuse_both(targets: Sequence[str], saved: Sequence[str]) -> None:
    """peft stores of a module either its adapter or its weights."""
    both = [name for name in targets if name in saved]
    if both:
        leaf = both[0].rpartition(".")[2]
        raise RecipeError(
            f"'{both[0]}' would get an adapter and be trained whole.",
            where="lora_target_modules",
            hint=f"Name {leaf} there, or in lora_modules_to_save or unfrozen_parameters.",
        )


def _match_pattern(model: nn.Module, linears: list[str], pattern: str) -> list[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise RecipeError(
            f"'{pattern}' is not a regular expression: {error}.", where="lora_target_modules"
        ) from error
    found = [
        name
        for name in _adaptable(model)
        if compiled.fullmatch(name) or name.rpartition(".")[2] == pattern
    ]
    if not found:
        raise _no_match(pattern, linears)
    return found


def _match_names(model: nn.Module, linears: list[str], wanted: Sequence[str]) -> list[str]:
    names = _adaptable(model)
    found: list[str] = []
    for word in wanted:
        matches = [name for name in names if name == word or name.endswith(f".{word}")]
        if not matches:
            raise _no_match(word, linears)
        found += matches
    return sorted(set(found), key=names.index)


def _adaptable(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if _is_linear(module) or isinstance(module, nn.Embedding)
    ]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _no_match(word: str, linears: Sequence[str]) -> RecipeError:
    leaves = sorted({name.rpartition(".")[2] for name in linears})
    shown = ", ".join(leaves[:_SHOWN]) + (" ..." if len(leaves) > _SHOWN else "")
    return RecipeError(
        f"'{word}' matches no linear of the model.",
        where="lora_target_modules",
        hint=" ".join(filter(None, [_suggest(word, leaves), f"It has {shown}."])),
    )


def _suggest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean '{close[0]}'?" if close else ""


def _whole(value: float) -> Any:
    """16.0 as 16, as other programs write it."""
    return int(value) if value == int(value) else value
