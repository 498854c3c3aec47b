"""Rules between the keys of the datasets and how rows are made of them."""

import re
from collections.abc import Iterator

from ndtrain.recipe.data_keys import InstructionMapping
from ndtrain.recipe.problem import KeyPath, Problem, both_given, unknown_word
from ndtrain.recipe.schema import Recipe
from ndtrain.recipe.template_choice import TemplateChoice, choose_template, has_own_template
from ndtrain.recipe.words import CHAT_TEMPLATES, DATASET_TYPES, FILE_KINDS

_LAYOUTS = (
    ("format", "instruction", ("instruction", "input", "system")),
    ("no_input_format", "instruction", ("instruction", "input", "system")),
    ("system_format", "system", ("system",)),
)
_SET_FOR_EACH_ROW = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "messages",
        "return_assistant_tokens_mask",
        "tools",
    }
)
_SWITCHES = {"yes": True, "no": False, "on": True, "off": False}
"""Words that YAML 1.1 took for true or false, and YAML 1.2 reads as they are."""
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_OTHER_LOADERS = ("audiofolder", "imagefolder", "pandas", "videofolder", "webdataset", "xml")
"""File kinds of the hub's library; without files it would take what lies in the current folder."""


def rows_given_once(recipe: Recipe) -> Problem | None:
    """Training rows come from `datasets` or from `pretraining_dataset`, not from both."""
    if recipe.datasets and recipe.pretraining_dataset:
        return both_given("pretraining_dataset", "datasets")
    if not recipe.datasets and not recipe.pretraining_dataset:
        return Problem(
            ("datasets",),
            "no dataset is given.",
            "Add a list of mappings with `path` and `type`.",
            also=("pretraining_dataset",),
        )
    return None


def stream_needs_max_steps(recipe: Recipe) -> Problem | None:
    """A `pretraining_dataset` has no known end, so `max_steps` says when to stop."""
    if recipe.pretraining_dataset and recipe.max_steps is None:
        return Problem(("pretraining_dataset",), "needs max_steps.", also=("max_steps",))
    return None


def stream_has_no_held_out_share(recipe: Recipe) -> Problem | None:
    """No share can be held out of a stream: `test_datasets` names the evaluation rows instead."""
    if recipe.pretraining_dataset and recipe.val_set_size:
        return Problem(
            ("val_set_size",),
            "a pretraining_dataset has no known length to hold rows out of.",
            "Use test_datasets.",
            also=("pretraining_dataset",),
        )
    return None


def one_source_of_evaluation_rows(recipe: Recipe) -> Problem | None:
    """Evaluation rows come from `val_set_size` or from `test_datasets`, not from both."""
    if recipe.val_set_size and recipe.test_datasets:
        return both_given("val_set_size", "test_datasets")
    return None


def held_out_share_or_count(recipe: Recipe) -> Problem | None:
    """`val_set_size` is a share below 1 or a whole number of rows."""
    size = recipe.val_set_size
    if size >= 1 and size != int(size):
        return Problem(("val_set_size",), f"'{size}' is neither a share below 1 nor a whole count.")
    return None


def dataset_types_exist(recipe: Recipe) -> Problem | None:
    """The `type` of a dataset is one of the known row formats, a mapping, or null."""
    for key in ("datasets", "test_datasets"):
        for number, dataset in enumerate(getattr(recipe, key)):
            if isinstance(dataset.type, str) and dataset.path != "synthetic":
                problem = unknown_word((key, number, "type"), dataset.type, DATASET_TYPES)
                if problem:
                    return problem
    return None


def layouts_hold_their_words(recipe: Recipe) -> Problem | None:
    """A prompt's layout holds `{instruction}`, and no word in braces but that, input and system."""
    for key in ("datasets", "test_datasets"):
        for number, dataset in enumerate(getattr(recipe, key)):
            if not isinstance(dataset.type, InstructionMapping):
                continue
            for name, needed, allowed in _LAYOUTS:
                layout = getattr(dataset.type, name)
                path = (key, number, "type", name)
                unknown = [word for word in _PLACEHOLDER.findall(layout) if word not in allowed]
                if unknown:
                    known = ", ".join(f"{{{word}}}" for word in allowed)
                    return Problem(path, f"'{{{unknown[0]}}}' is unknown.", f"Known: {known}.")
                if f"{{{needed}}}" not in layout:
                    return Problem(
                        path, f"'{layout}' lacks {{{needed}}}.", "Write it where that text stands."
                    )
    return None


def file_kinds_name_their_files(recipe: Recipe) -> Problem | None:
    """A `path` that is a file kind, such as json, says which files in `data_files`."""
    for key in ("datasets", "test_datasets", "pretraining_dataset"):
        for number, dataset in enumerate(getattr(recipe, key)):
            kind = dataset.path
            if kind in (*FILE_KINDS, *_OTHER_LOADERS) and not dataset.data_files:
                return Problem(
                    (key, number, "path"),
                    f"'{kind}' is a file kind and says not which files.",
                    f"Name them with data_files, or write ./{kind} for a folder.",
                )
    return None


def chat_templates_exist(recipe: Recipe) -> Problem | None:
    """`chat_template` is tokenizer_default (the model's own), jinja, or the name of a family.

    `tokenizer_default_fallback_<family>` takes the family's where the model has none.
    """
    for path, choice in _templates(recipe):
        family = choice.name.removeprefix("tokenizer_default_fallback_")
        if family != choice.name and family in CHAT_TEMPLATES:
            continue
        known = ("tokenizer_default", "jinja", *CHAT_TEMPLATES)
        problem = unknown_word((*path, "chat_template"), choice.name, known)
        if problem:
            return problem
    return None


def jinja_template_given(recipe: Recipe) -> Problem | None:
    """`chat_template: jinja` needs the template in the `chat_template_jinja` beside it."""
    for path, choice in _templates(recipe):
        if choice.name == "jinja" and not choice.jinja:
            return Problem(
                (*path, "chat_template"),
                "'jinja' needs chat_template_jinja.",
                also=() if path else ("chat_template_jinja",),
            )
    return None


def one_template_at_a_level(recipe: Recipe) -> Problem | None:
    """`chat_template_jinja` is the template of `chat_template: jinja`, not of another name."""
    for path, choice in _templates(recipe):
        if choice.jinja and choice.name != "jinja":
            return Problem(
                (*path, "chat_template_jinja"),
                f"does nothing with chat_template: {choice.name}.",
                "Remove it, or set chat_template: jinja.",
                also=() if path else ("chat_template",),
            )
    return None


def template_variables_are_free(recipe: Recipe) -> Problem | None:
    """`chat_template_kwargs` holds no name that a template is given for each conversation."""
    for name in recipe.chat_template_kwargs:
        if name in _SET_FOR_EACH_ROW:
            return Problem(
                ("chat_template_kwargs", name),
                "is set anew for each conversation.",
                "Remove it; tools, for one, are a column of the rows.",
            )
    return None


def template_switches_are_no_words(recipe: Recipe) -> Problem | None:
    """A `no` in `chat_template_kwargs` is a word, and to a template every word is true."""
    for name, value in recipe.chat_template_kwargs.items():
        word = value.lower() if isinstance(value, str) else ""
        if word in _SWITCHES:
            return Problem(
                ("chat_template_kwargs", name),
                f"is the text '{value}', which a template takes for true.",
                f"Write {str(_SWITCHES[word]).lower()} if a switch is meant.",
                is_notice=True,
            )
    return None


def _templates(recipe: Recipe) -> Iterator[tuple[KeyPath, TemplateChoice]]:
    """The recipe's template and those that datasets choose for themselves, with their places."""
    yield (), choose_template(recipe)
    for key in ("datasets", "test_datasets"):
        for number, dataset in enumerate(getattr(recipe, key)):
            if has_own_template(dataset):
                yield (key, number), choose_template(recipe, dataset)


def shares_or_counts(recipe: Recipe) -> Problem | None:
    """In a mixture each dataset has a `weight` or a number of `samples`, not both."""
    for number, dataset in enumerate(recipe.datasets):
        if dataset.weight is not None and dataset.samples is not None:
            return Problem(
                ("datasets", number, "samples"), "'weight' is given too.", "Keep one of them."
            )
    return None


def all_or_no_weights(recipe: Recipe) -> Problem | None:
    """Shares are relative to each other, so either every dataset has a `weight` or none has."""
    without = [
        number
        for number, dataset in enumerate(recipe.datasets)
        if dataset.weight is None and dataset.samples is None
    ]
    if without and any(dataset.weight is not None for dataset in recipe.datasets):
        return Problem(
            ("datasets", without[0]),
            "has no weight, but another dataset has one.",
            "Give every dataset a weight, or none.",
        )
    return None


def evaluation_has_no_shares(recipe: Recipe) -> Problem | None:
    """Sets of `test_datasets` are not mixed: a `weight` says nothing of them, `samples` does."""
    for number, dataset in enumerate(recipe.test_datasets):
        if dataset.weight is not None:
            return Problem(
                ("test_datasets", number, "weight"),
                "evaluation sets are not mixed.",
                "Remove it, or set samples: a number of rows.",
            )
    return None
