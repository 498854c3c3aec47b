"""`${VAR}` and `${VAR:-default}` in the keys that hold paths; everywhere else `$` is just text."""

import re
from collections.abc import Callable
from typing import Any

from ndtrain.recipe.problem import KeyPath, Problem

PATH_KEYS = frozenset(
    {
        "base_model",
        "chat_template_jinja",
        "dataset_prepared_path",
        "lora_model_dir",
        "output_dir",
        "resume_from_checkpoint",
        "tokenizer_config",
    }
)
SOURCE_KEYS = frozenset({"datasets", "pretraining_dataset", "test_datasets"})
SOURCE_PATH_KEYS = frozenset({"chat_template_jinja", "data_files", "path"})

_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")

Lookup = Callable[[str], str | None]


def expand_variables(data: dict[str, Any], lookup: Lookup) -> list[Problem]:
    """Replace variables in the path-like keys of `data`; undefined ones are problems."""
    problems: list[Problem] = []
    for key in PATH_KEYS & data.keys():
        data[key] = _expand(data[key], (key,), lookup, problems)
    for key in SOURCE_KEYS & data.keys():
        sources = data[key] if isinstance(data[key], list) else []
        for number, source in enumerate(sources):
            if isinstance(source, dict):
                for name in SOURCE_PATH_KEYS & source.keys():
                    path = (key, number, name)
                    source[name] = _expand(source[name], path, lookup, problems)
    return problems


def _expand(value: Any, path: KeyPath, lookup: Lookup, problems: list[Problem]) -> Any:
    if isinstance(value, list):
        return [
            _expand(item, (*path, number), lookup, problems) for number, item in enumerate(value)
        ]
    if not isinstance(value, str):
        return value

    def replaced(match: re.Match[str]) -> str:
        found = lookup(match["name"])
        if found is not None and (found or match["default"] is None):
            return found
        if match["default"] is not None:
            return match["default"]
        problems.append(
            Problem(
                path,
                f"the environment variable '{match['name']}' is not set.",
                f"Set it, or write '${{{match['name']}:-default}}'.",
            )
        )
        return match[0]

    return _VARIABLE.sub(replaced, value)
