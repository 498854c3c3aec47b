"""The files that a recipe names must exist, and each key about them must have an effect.

Found here, before any process is started.
"""

import glob
from collections.abc import Iterator
from pathlib import Path

from ndtrain.errors import RecipeError
from ndtrain.recipe.addresses import PACKAGE, looks_local, resolve_address
from ndtrain.recipe.data_keys import DatasetSpec, PretrainingSpec
from ndtrain.recipe.problem import KeyPath, Problem, nearest
from ndtrain.recipe.schema import Recipe
from ndtrain.recipe.splits import split_in_name, split_name
from ndtrain.recipe.template_choice import template_path
from ndtrain.recipe.words import FILE_KINDS


def missing_files(recipe: Recipe) -> Iterator[Problem]:
    """A problem for each local file that does not exist, and for keys that say nothing of one."""
    for key in ("datasets", "test_datasets", "pretraining_dataset"):
        for number, source in enumerate(getattr(recipe, key)):
            yield from _missing_source((key, number), source)
    if recipe.chat_template_jinja is not None:
        yield from _missing_template(("chat_template_jinja",), recipe.chat_template_jinja)


def _missing_source(path: KeyPath, source: DatasetSpec | PretrainingSpec) -> Iterator[Problem]:
    problem = None
    if source.path != "synthetic":
        problem = _missing_path((*path, "path"), source.path, must_be_local=False)
    if problem:
        yield problem
    elif source.path in FILE_KINDS:
        names = source.data_files
        for name in (names,) if isinstance(names, str) else names or ():
            is_pattern = glob.has_magic(name) and not Path(name).expanduser().exists()
            found = None if is_pattern else _missing_path((*path, "data_files"), name, True)
            if found:
                yield found
        yield from _idle_keys(path, source, Path())
    elif source.path != "synthetic":
        address = resolve_address(source.path)
        if address is not None:
            yield from _idle_keys(path, source, address)
    if isinstance(source, DatasetSpec) and source.chat_template_jinja is not None:
        yield from _missing_template((*path, "chat_template_jinja"), source.chat_template_jinja)


def _idle_keys(
    path: KeyPath, source: DatasetSpec | PretrainingSpec, address: Path
) -> Iterator[Problem]:
    """Keys that choose among the rows of a hub dataset and say nothing of files on this disk."""
    for key in ("name", "revision"):
        if getattr(source, key, None) is not None:
            yield Problem(
                (*path, key), f"has no effect: '{source.path}' is no hub dataset.", "Remove it."
            )
    is_file = address.is_file()
    if is_file and source.data_files is not None:
        yield Problem((*path, "data_files"), "has no effect: the path is a file.", "Remove it.")
    split = (*path, "split")
    own = split_in_name(address.name) if is_file else None
    if set(source.split) & set("[]+%"):
        yield Problem(
            split,
            f"'{source.split}' can only be taken of a hub dataset, not of files.",
            "Name a whole split; samples takes a number of rows, val_set_size holds some out.",
        )
    elif (is_file or source.data_files) and split_name(source.split) not in ("train", own):
        named = "the path is a file" if is_file else "data_files names the files"
        yield Problem(split, f"'{source.split}' has no effect: {named}.", "Remove it.")


def _missing_path(path: KeyPath, text: str, must_be_local: bool) -> Problem | None:
    if text.startswith(PACKAGE):
        try:
            resolve_address(text)
        except RecipeError as error:
            return Problem(path, error.message, error.hint)
        return None
    if "://" in text or not (must_be_local or looks_local(text)):
        return None
    file = Path(text).expanduser()
    if file.exists():
        return None
    return Problem(path, f"the file '{text}' does not exist.", _advice(file))


def _advice(file: Path) -> str:
    """The file that was probably meant, or how the path was read."""
    siblings = [entry.name for entry in file.parent.glob("*")] if file.parent.is_dir() else []
    close = nearest(file.name, siblings)
    if close:
        return f"Did you mean '{file.parent / close}'?"
    if not file.is_absolute():
        return f"Paths start at the current folder, '{Path.cwd()}'."
    return ""


def _missing_template(path: KeyPath, text: str) -> Iterator[Problem]:
    """A template that is an address must be one of a file."""
    try:
        file = template_path(text)
    except RecipeError as error:
        yield Problem(path, error.message, error.hint)
        return
    if file is not None and not file.is_file():
        yield Problem(path, f"the file '{text}' does not exist.", _advice(file))
