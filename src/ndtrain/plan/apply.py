"""Writes a chosen mesh back into the user's recipe, leaving every other character as it is."""

from collections.abc import Mapping

import yaml

from ndtrain.errors import RecipeError
from ndtrain.plan.search import Candidate
from ndtrain.recipe.schema import Recipe

_POLICY_VALUES = {"none": "false", "budget": "budget", "attention": "attention", "full": "true"}


def chosen_keys(recipe: Recipe, candidate: Candidate) -> dict[str, str]:
    """The recipe keys that make a run the candidate, with the batch in the form the recipe has."""
    parallel, setting = candidate.parallel, candidate.setting
    keys = {
        "dp_replicate_size": str(parallel.dp_replicate),
        "dp_shard_size": str(parallel.dp_shard),
        "context_parallel_size": str(parallel.cp),
        "tensor_parallel_size": str(parallel.tp),
        "micro_batch_size": str(setting.micro_batch),
        "gradient_checkpointing": _POLICY_VALUES[setting.policy],
    }
    if setting.compiled and setting.policy in ("none", "budget"):
        keys["activation_memory_budget"] = (
            f"{setting.budget:g}" if setting.policy == "budget" else "1"
        )
    if recipe.activation_offloading and not setting.offload:
        keys["activation_offloading"] = "false"
    if setting.tiled and not recipe.tiled_mlp:
        keys["tiled_mlp"] = "true"
    batch = "gradient_accumulation_steps", "global_batch_size"
    if recipe.global_batch_size is None:
        form, other, rows = *batch, setting.accumulation
    else:
        form, other, rows = *reversed(batch), recipe.global_batch_size
    keys[form] = str(rows)
    if other in recipe.model_fields_set:
        # Emptied by a flag, it may still have a value in the file, and the two exclude each other.
        keys[other] = "null"
    return keys


def set_keys(text: str, values: Mapping[str, str], *, where: str = "recipe") -> str:
    """`text` with top-level keys set: values that stand there are replaced, others added.

    Args:
        values: YAML scalars by key.
        where: how messages call the file.

    Raises:
        RecipeError: the text is not a YAML mapping, or a value to replace is not a scalar.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise RecipeError("the recipe is not a mapping of keys.", where=where)
    edits: list[tuple[int, int, str]] = []
    present = set()
    for key, value in root.value:
        if key.value not in values:
            continue
        present.add(key.value)
        if not isinstance(value, yaml.ScalarNode):
            line, column = value.start_mark.line + 1, value.start_mark.column + 1
            raise RecipeError(
                f"{key.value} is not a single value, so it cannot be replaced.",
                where=f"{where}:{line}:{column}",
                hint="Write it as one value.",
            )
        start, end = value.start_mark.index, value.end_mark.index
        # An empty value ends where its key does: keep a space before what is written.
        new = values[key.value] if start != end else f" {values[key.value]}"
        edits.append((start, end, new))
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    added = [f"{key}: {value}" for key, value in values.items() if key not in present]
    if not added:
        return text
    newline = "\r\n" if "\r\n" in text else "\n"
    return _append(text, root, added, newline)


def _append(text: str, root: yaml.MappingNode, lines: list[str], newline: str) -> str:
    """`text` with lines added at its end; a mapping in braces takes them inside."""
    if root.flow_style:
        body = text.rstrip()
        return f"{body.removesuffix('}').rstrip().removesuffix(',')}, {', '.join(lines)}}}{newline}"
    body = text.rstrip("\r\n")
    closing = newline
    if body.endswith("\n...") or body == "...":
        body, closing = body[:-3].rstrip("\r\n"), f"{newline}...{newline}"
    return body + newline + newline.join(lines) + closing
