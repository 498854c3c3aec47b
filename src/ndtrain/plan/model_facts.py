"""The sizes of the model a recipe names: from its folder, the hub cache, a file or the book."""

from pathlib import Path

from ndtrain.errors import MeshError
from ndtrain.plan.book import close_in_book, facts_from_book
from ndtrain.plan.facts import ModelFacts, facts_from_config
from ndtrain.plan.model_source import (
    ModelSource,
    find_model,
    looks_like_folder,
    near_folder,
)
from ndtrain.recipe.schema import Recipe

_SOURCE_WORDS = {"folder": "folder", "hub": "cache", "gguf": "gguf", "random": "recipe"}


def find_facts(recipe: Recipe, *, where: str = "base_model") -> ModelFacts:
    """The sizes of the recipe's model; what is on this machine wins over the book.

    Raises:
        MeshError: the model is neither here nor in the book.
    """
    try:
        source = find_model(recipe, where=where)
    except MeshError:
        facts = facts_from_book(recipe.base_model or "")
        if facts is None:
            raise
        return facts
    return facts_of_source(source, where=where)


def facts_of_source(source: ModelSource, *, where: str = "base_model") -> ModelFacts:
    """The sizes of a model that was found.

    Raises:
        MeshError: it is a hub model that is neither downloaded nor in the book.
    """
    if source.config:
        return facts_from_config(source.config, name=source.name, source=_SOURCE_WORDS[source.kind])
    facts = facts_from_book(source.name)
    if facts is None:
        raise unknown_sizes(source.name, where)
    return facts


def unknown_sizes(name: str, where: str) -> MeshError:
    """The refusal of a model that is neither on this machine nor in the book."""
    close = near_folder(Path(name)) or close_in_book(name)
    meant = f"; did you mean '{close}'?" if close else "."
    if looks_like_folder(name):
        return MeshError(
            f"there is no folder '{name}' here, and it is no downloaded hub model either{meant}",
            where=where,
            hint=f"Paths start at the current folder, '{Path.cwd()}'; a model of the hub must be "
            "downloaded once.",
        )
    return MeshError(
        f"the sizes of '{name}' are not known: it is not downloaded, and the model book does not "
        f"have it{meant}",
        where=where,
        hint="Download it once, name its folder, or write its sizes as model_config.",
    )
