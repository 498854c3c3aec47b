"""From a file and `--set` flags to a frozen recipe, or to every problem at once.

defaults < file < --set; each value remembers where it came from.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ndtrain.environment import lookup
from ndtrain.errors import NdtrainError, Problems, RecipeError
from ndtrain.recipe.axolotl import translate
from ndtrain.recipe.document import Document, parse_document, read_text
from ndtrain.recipe.explain import explain, field_at, suggestion, takes_text
from ndtrain.recipe.files import missing_files
from ndtrain.recipe.overrides import apply_overrides
from ndtrain.recipe.problem import KeyPath, Places, Problem, dotted, parse_dotted
from ndtrain.recipe.rules import broken_rules
from ndtrain.recipe.schema import Recipe
from ndtrain.recipe.variables import Lookup, expand_variables


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with the story of its values.

    Attributes:
        text: the file as it was read.
        overrides: the `--set` flags.
        origins: for every top-level key and every nested one that was given, `default`,
            `recipe.yaml:7:5` or `--set`.
        notices: what the user should know: keys that are not needed here, renamed keys.
    """

    recipe: Recipe
    path: Path
    text: str
    overrides: tuple[str, ...]
    origins: Mapping[str, str]
    notices: tuple[str, ...]
    places: Places = field(repr=False)

    def position(self, key: str) -> str:
        """Where `key` (`datasets[0].path`) was given: `file:line:col`, or the flag."""
        path = parse_dotted(key)
        if path[0] not in {known[0] for known in self.places.spots}:
            return self.places.file
        return self.places.where(self.places.find(path))


def load_recipe(
    path: Path, overrides: Sequence[str] = (), *, check: bool = True, lookup: Lookup = lookup
) -> LoadedRecipe:
    """Read, override, translate, check.

    Args:
        check: also apply the rules between keys and look for the files that the recipe names;
            without it, a recipe whose datasets have moved can still be read.
        lookup: what `${VAR}` is looked up in.

    Raises:
        RecipeError: the file cannot be read as YAML.
        Problems: everything else that is wrong, sorted by place.
    """
    text = read_text(path)
    document = parse_document(text, str(path))
    apply_overrides(document, overrides)
    recipe, found = examine(document, lookup, check=check)
    places = Places(str(path), document.spots)
    errors: list[NdtrainError] = [
        *places.report(problem for problem in found if not problem.is_notice)
    ]
    if errors or recipe is None:
        raise Problems(errors)
    notices = places.report(problem for problem in found if problem.is_notice)
    return LoadedRecipe(
        recipe=recipe,
        path=path,
        text=text,
        overrides=tuple(overrides),
        origins=_origins(places, document.data),
        notices=tuple(str(notice) for notice in notices),
        places=places,
    )


def examine(
    document: Document, lookup: Lookup = lookup, *, check: bool = True
) -> tuple[Recipe | None, list[Problem]]:
    """Everything there is to say about a parsed recipe, problems and notices, in no order.

    The rules between keys are applied to what is sound, even where some keys are broken.
    """
    found = [*document.problems, *translate(document)]
    found += expand_variables(document.data, lookup)
    recipe, wrong = _validate(document)
    found += wrong
    # What rests on a broken key would only be said twice, in other words.
    broken = frozenset(key for problem in found if not problem.is_notice for key in problem.keys)
    if recipe is not None and (check or broken):
        further = [*broken_rules(recipe), *missing_files(recipe)]
        found += [problem for problem in further if _is_news(problem, found, broken)]
    return recipe, found


def check_rules(loaded: LoadedRecipe) -> tuple[list[RecipeError], tuple[str, ...]]:
    """What the rules between keys forbid, missing files too, and what they say and let pass.

    For a recipe loaded without `check`.
    """
    found = [*broken_rules(loaded.recipe), *missing_files(loaded.recipe)]
    errors = loaded.places.report(problem for problem in found if not problem.is_notice)
    notices = loaded.places.report(problem for problem in found if problem.is_notice)
    return errors, tuple(map(str, notices))


def _validate(document: Document) -> tuple[Recipe | None, list[Problem]]:
    """The recipe, and what is wrong; with problems, a recipe of the sound keys where possible."""
    data = copy.deepcopy(document.data)
    problems: list[Problem] = []
    for _ in range(4):
        try:
            return Recipe.model_validate(data), problems
        except ValidationError as error:
            found = explain(error, data)
        if not problems and _restore_texts(document, data, found):
            document.data = copy.deepcopy(data)
            continue
        problems += [problem for problem in found if problem.path not in _paths(problems)]
        for problem in found:
            _repair(document, data, problem.path)
    return None, problems


def _paths(problems: Sequence[Problem]) -> set[KeyPath]:
    return {problem.path for problem in problems}


def _restore_texts(document: Document, data: dict[str, Any], found: Sequence[Problem]) -> bool:
    """Where text was expected and YAML saw a number (`revision: 7e10`), take what was written."""
    changed = False
    for problem in found:
        written = document.texts.get(problem.path)
        owner = field_at(problem.path)
        if written is None or owner is None or not takes_text(owner):
            continue
        value, holder = _holder(data, problem.path)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and holder is not None:
            holder[problem.path[-1]] = written
            changed = True
    return changed


def _holder(data: Any, path: KeyPath) -> tuple[Any, Any]:
    """The value at `path` and the mapping or list that holds it."""
    holder = None
    for step in path:
        holder = data
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            return None, None
    return data, holder


_STAND_INS: Mapping[str, Any] = {"learning_rate": 1.0}


def _repair(document: Document, data: dict[str, Any], path: KeyPath) -> None:
    """Take a broken value out, so that the rest can still be checked.

    A misspelt required key is taken for the right one. Any other missing or broken required key
    takes the mapping around it along, except at the top.
    """
    if not path:
        return
    value, holder = _holder(data, path)
    meant = suggestion(path) if isinstance(holder, dict) else None
    if meant and meant not in holder:
        owner = field_at((*path[:-1], meant))
        if owner is not None and owner.is_required():
            holder[meant] = value
            document.move(path, (*path[:-1], meant))
    if len(path) == 1 and path[0] in _STAND_INS:
        data[str(path[0])] = _STAND_INS[str(path[0])]
        return
    owner = field_at(path)
    required = owner is not None and owner.is_required() and isinstance(path[-1], str)
    target = path[:-1] if required else path
    if isinstance(target[-1], int) and target[0] not in _SOURCES:
        target = target[:-1]
    _, holder = _holder(data, target)
    if isinstance(holder, dict):
        holder.pop(str(target[-1]), None)
    elif isinstance(holder, list) and isinstance(target[-1], int):
        # a sound stand-in keeps the numbers of the datasets behind it
        holder[target[-1]] = {"path": "synthetic"}


_SOURCES = frozenset({"datasets", "test_datasets", "pretraining_dataset"})


def _is_news(problem: Problem, found: Sequence[Problem], broken: frozenset[str]) -> bool:
    """Whether a later finding says something that the broken keys do not explain."""
    if len(problem.path) > 1:
        return problem.path not in _paths(found)
    return not problem.keys & broken


def _origins(places: Places, data: Mapping[str, Any]) -> dict[str, str]:
    origins = dict.fromkeys(Recipe.fields_by_key(), "default")
    for path, place in sorted(places.spots.items(), key=lambda item: item[1]):
        if path[0] in data and path[0] in origins:
            origins[dotted(path)] = "--set" if place.flag else places.where(place)
    return origins
