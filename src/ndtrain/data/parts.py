"""The datasets of a recipe, each with its reader, its rules and everything that decides it."""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from ndtrain.data.chat_mask import TrainRules
from ndtrain.data.chat_template import ChatTemplate
from ndtrain.data.encode import EncodeRules, RowEncoder
from ndtrain.data.formats.catalog import find_format
from ndtrain.data.rows import RawRow
from ndtrain.data.sources import Source, find_source
from ndtrain.data.template_search import build_chat_template
from ndtrain.data.tokens import TextEncoder
from ndtrain.errors import NdtrainError, RecipeError
from ndtrain.recipe.schema import DatasetSpec, PretrainingSpec, Recipe
from ndtrain.recipe.template_choice import choose_template, has_own_template

CHAT_TYPES = ("chat_template", "sharegpt")
_TEMPLATE = "chat_template"
VALIDATION = "validation"
"""The name of the evaluation set that `val_set_size` holds out."""


class Placed(Protocol):
    """A recipe that knows where each of its keys was given."""

    @property
    def recipe(self) -> Recipe:
        """The recipe itself."""

    def position(self, key: str) -> str:
        """`file:line:col` of a key such as `datasets[0].path`."""


@dataclass(frozen=True)
class Part:
    """One dataset on its way: what is read, how, and for which set of rows.

    Attributes:
        eval_name: name of the evaluation set it makes up; None for training rows.
        skip: rows left out at the start.
        max_tokens: reading stops after so many tokens; None reads everything.
        ingredients: everything that decides the result, for the cache key.
    """

    spec: DatasetSpec
    source: Source
    encoder: RowEncoder
    eval_name: str | None
    skip: int
    max_tokens: int | None
    ingredients: Mapping[str, Any]

    def rows(self) -> Iterator[RawRow]:
        """The raw rows, from the first that is used."""
        return islice(self.source.rows(), self.skip, None)


def split_seed(recipe: Recipe) -> int:
    """The seed of splits, mixtures and made-up rows."""
    return recipe.seed if recipe.preprocessing_seed is None else recipe.preprocessing_seed


def find_parts(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    position: Callable[[str], str],
    max_tokens: int | None,
) -> list[Part]:
    """Every dataset of the recipe, training sets first.

    Raises:
        RecipeError: a source, format or template is not found, or there is no training set.
    """
    texts = TextEncoder(tokenizer)
    wanted: list[tuple[str, DatasetSpec, str | None, int, int | None]] = []
    for number, spec in enumerate(recipe.datasets):
        wanted.append((f"datasets[{number}]", spec, None, 0, None))
    for number, stream in enumerate(recipe.pretraining_dataset):
        key = f"pretraining_dataset[{number}]"
        share = None if max_tokens is None else -(-max_tokens // len(recipe.pretraining_dataset))
        wanted.append((key, _as_completion(stream), None, stream.skip, share))
    if not wanted:
        raise RecipeError(
            "the recipe names no rows to train on.",
            where=position("datasets"),
            hint="Add a `datasets:` entry with a path and a type.",
        )
    names = {VALIDATION} if recipe.val_set_size else set()
    for number, spec in enumerate(recipe.test_datasets):
        name = _free_name(Path(spec.path).stem or "test", names)
        names.add(name)
        wanted.append((f"test_datasets[{number}]", spec, name, 0, None))
    parts: list[Part] = []
    for key, spec, eval_name, skip, limit in wanted:
        try:
            part = _find_part(recipe, spec, texts, eval_name)
        except RecipeError as error:
            inside = f"{key}.{error.where}" if error.where else key
            if error.where.startswith(_TEMPLATE) and not has_own_template(spec):
                inside = error.where
            raise RecipeError(error.message, where=position(inside), hint=error.hint) from error
        parts.append(
            replace(
                part,
                skip=skip,
                max_tokens=limit,
                ingredients={**part.ingredients, "skip": skip, "max_tokens": limit},
            )
        )
    return parts


def _free_name(wanted: str, taken: Set[str]) -> str:
    """The name, with the first number behind it that makes it one of its own."""
    numbered = (f"{wanted}-{number}" for number in count(2))
    return next(name for name in chain([wanted], numbered) if name not in taken)


def _as_completion(stream: PretrainingSpec) -> DatasetSpec:
    """A stream of text as a dataset of completion rows."""
    given = {
        "path": stream.path,
        "type": "completion",
        "name": stream.name,
        "split": stream.split,
        "field": stream.text_column,
        "data_files": stream.data_files,
    }
    return DatasetSpec.model_validate(given)


def _find_part(
    recipe: Recipe, spec: DatasetSpec, texts: TextEncoder, eval_name: str | None
) -> Part:
    read = find_format(spec)
    source = find_source(
        spec, len(texts.tokenizer), split_seed(recipe), streaming=bool(recipe.pretraining_dataset)
    )
    template = _find_template(recipe, spec, texts)
    rules = EncodeRules(
        sequence_len=(eval_name and recipe.eval_sequence_len) or recipe.sequence_len,
        excess=recipe.excess_length_strategy,
        min_len=recipe.min_sample_len,
        train_on_inputs=recipe.train_on_inputs,
        skip_bad_rows=spec.on_bad_row == "skip",
        default_system=recipe.default_system_message,
        chat=TrainRules(
            frozenset(spec.roles_to_train), spec.train_on_eos, everything=recipe.train_on_inputs
        ),
    )
    ingredients = {
        "content": source.fingerprint(),
        "spec": spec.model_dump(mode="json"),
        "rules": repr(replace(rules, chat=replace(rules.chat, roles=frozenset()))),
        "template": None if template is None else [template.source, str(template.variables)],
        "eval": eval_name,
    }
    encoder = RowEncoder(texts, spec, read, rules, template)
    return Part(spec, source, encoder, eval_name, 0, None, ingredients)


def _find_template(recipe: Recipe, spec: DatasetSpec, texts: TextEncoder) -> ChatTemplate | None:
    """The chat template of a dataset, the dataset's own before the recipe's."""
    if spec.path == "synthetic" or spec.type not in CHAT_TYPES:
        return None
    choice = choose_template(recipe, spec)
    try:
        return build_chat_template(
            texts.tokenizer,
            choice.name,
            choice.jinja,
            recipe.chat_template_kwargs,
        )
    except NdtrainError as error:
        key = "chat_template_jinja" if choice.name == "jinja" and choice.jinja else _TEMPLATE
        raise RecipeError(error.message, where=key, hint=error.hint) from error
