"""Which chat template a dataset gets: its own name and Jinja, or both of the recipe."""

from dataclasses import dataclass
from pathlib import Path

from ndtrain.recipe.addresses import resolve_address
from ndtrain.recipe.schema import DatasetSpec, Recipe


@dataclass(frozen=True)
class TemplateChoice:
    """A template's name and its Jinja, both given at the same level.

    Attributes:
        name: tokenizer_default, jinja, a family, or tokenizer_default_fallback_<family>.
        jinja: Jinja text or the address of a file with it; None for the other names.
    """

    name: str
    jinja: str | None


def has_own_template(dataset: DatasetSpec) -> bool:
    """Whether a dataset chooses its template; else it gets the recipe's."""
    return dataset.chat_template is not None or dataset.chat_template_jinja is not None


def choose_template(recipe: Recipe, dataset: DatasetSpec | None = None) -> TemplateChoice:
    """The template of a dataset, or of the recipe; Jinja alone means `jinja`."""
    level = dataset if dataset is not None and has_own_template(dataset) else recipe
    name, jinja = level.chat_template or "tokenizer_default", level.chat_template_jinja
    return TemplateChoice("jinja" if jinja and name == "tokenizer_default" else name, jinja)


def template_path(jinja: str) -> Path | None:
    """The file that `chat_template_jinja` names; None where it is the template itself.

    Raises:
        RecipeError: a `package://` address whose package or file is missing.
    """
    if "{" in jinja or "\n" in jinja:
        return None
    return resolve_address(jinja) or Path(jinja)
