"""`ndtrain preprocess` and `ndtrain validate --data`: prepare the rows and show what is trained."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ndtrain.environment import no_color
from ndtrain.errors import ExitCode
from ndtrain.recipe.load import LoadedRecipe, load_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ndtrain.data.prepare import Prepared


def preprocess(
    recipe: Path, *, overrides: Sequence[str] = (), show: int = 0, as_json: bool = False
) -> ExitCode:
    """Prepare a recipe's rows, print their counts and the first rows with what is trained.

    Args:
        show: rows to print.
        as_json: print one JSON object instead.
    """
    loaded = load_recipe(recipe, overrides)
    console = Console(no_color=no_color() or None, highlight=False, soft_wrap=True, markup=False)
    prepared, tokenizer = prepare_loaded(loaded, console if not as_json else None)
    if as_json:
        rows = [_row_as_json(prepared, tokenizer, row) for row in _shown(prepared, show)]
        result = {**prepared.report.to_json(), "path": str(prepared.path), "rows": rows}
        print(json.dumps(result, indent=2, ensure_ascii=False))
        return ExitCode.OK
    from ndtrain.data.preview import describe_data

    for line in describe_data(prepared.report):
        console.print(line)
    state = "found ready in" if prepared.report.cached else "written to"
    console.print(f"prepared rows {state} {prepared.path}")
    for row in _shown(prepared, show):
        _print_row(console, prepared, tokenizer, row)
    return ExitCode.OK


def data_report(loaded: LoadedRecipe) -> Mapping[str, Any]:
    """The counts of a recipe's rows, which are prepared if they were not."""
    prepared, _ = prepare_loaded(loaded, None)
    return prepared.report.to_json()


def data_summary(loaded: LoadedRecipe) -> Mapping[str, Any]:
    """The same as lines for a person."""
    from ndtrain.data.preview import describe_data

    prepared, _ = prepare_loaded(loaded, None)
    return {"data": "\n  ".join(describe_data(prepared.report))}


def prepare_loaded(
    loaded: LoadedRecipe, console: Console | None
) -> "tuple[Prepared, PreTrainedTokenizerBase]":
    """Prepared rows and their tokenizer, with a progress bar on a terminal."""
    from ndtrain.data.prepare import prepare
    from ndtrain.data.progress import progress_bar
    from ndtrain.model.tokenizer import load_tokenizer, tokenizer_key
    from ndtrain.plan.model_source import find_model

    recipe = loaded.recipe
    tokenizer = load_tokenizer(find_model(recipe, where=loaded.position("base_model")), recipe)
    key = tokenizer_key(tokenizer)
    with progress_bar(console) as tell:
        return prepare(loaded, tokenizer, key, on_progress=tell), tokenizer


def _shown(prepared: "Prepared", show: int) -> range:
    """The rows to print."""
    return range(min(show, len(prepared.train)))


def _print_row(
    console: Console, prepared: "Prepared", tokenizer: "PreTrainedTokenizerBase", row: int
) -> None:
    """One row: where it stands, and its text with what is trained coloured and in brackets."""
    from ndtrain.data.preview import trained_stretches

    rows = prepared.train
    console.print(
        f"\n--- {rows.place(row)}: {rows.lengths[row]} tokens, {rows.target_counts[row]} trained "
        "[[in brackets]]",
        style="dim",
    )
    text = Text()
    for stretch, trained in trained_stretches(*rows.row(row), tokenizer):
        text.append(f"[[{stretch}]]" if trained else stretch, "bold green" if trained else None)
    console.print(text)


def _row_as_json(
    prepared: "Prepared", tokenizer: "PreTrainedTokenizerBase", row: int
) -> dict[str, Any]:
    """One row for scripts: ids, labels and the marked text."""
    from ndtrain.data.preview import mark_plain, trained_stretches

    ids, labels = prepared.train.row(row)
    return {
        "place": prepared.train.place(row),
        "input_ids": ids.tolist(),
        "labels": labels.tolist(),
        "text": mark_plain(trained_stretches(ids, labels, tokenizer)),
    }
