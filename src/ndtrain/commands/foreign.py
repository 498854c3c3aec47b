"""Prints what becomes of a recipe written for another tool."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from ndtrain.errors import ExitCode, RecipeError
from ndtrain.recipe.axolotl_report import report_axolotl


def report_foreign(
    recipe: Path, tool: str, overrides: Sequence[str] = (), *, as_json: bool = False
) -> ExitCode:
    """Print each key with its verdict; exit 2 when one of them stops the recipe.

    Raises:
        RecipeError: `tool` is not known, or the file cannot be read.
    """
    if tool != "axolotl":
        raise RecipeError(f"'{tool}' is unknown.", where="--from", hint="Use --from axolotl.")
    rows = report_axolotl(recipe, overrides)
    counts = Counter(row.verdict for row in rows)
    if as_json:
        typer.echo(json.dumps({"counts": counts, "keys": [asdict(row) for row in rows]}, indent=2))
    else:
        for row in rows:
            typer.echo(f"{row.where}: {row.verdict:<7} {row.key}: {row.text}".rstrip(": "))
        typer.echo(
            f"\n{counts['same']} keys mean the same, {counts['adapted']} are adapted, "
            f"{counts['stops']} must be changed."
        )
    return ExitCode.RECIPE if counts["stops"] else ExitCode.OK
