"""`recipes`, `schema` and `env`: what there is to know without a recipe of one's own."""

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from ndtrain.commands.options import AsJson
from ndtrain.recipe.catalog import copy_example, find_example, list_examples
from ndtrain.recipe.listing import list_lines

recipes = typer.Typer(
    help="List, show and copy the bundled example recipes.",
    invoke_without_command=True,
    rich_markup_mode=None,
)


def example_names(incomplete: str) -> list[str]:
    """Names for shell completion."""
    return [one.name for one in list_examples() if one.name.startswith(incomplete)]


Name = Annotated[
    str,
    typer.Argument(metavar="NAME", autocompletion=example_names, show_default=False),
]


@recipes.callback()
def _default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        show_list()


@recipes.command("list")
def show_list() -> None:
    """One line a recipe: name, model, method, mesh, GPUs and title, as far as they fit."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in list_lines(list_examples(), width):
        typer.echo(line)
    typer.echo("\nNext: ndtrain recipes copy quickstart")


@recipes.command("show")
def show(name: Name) -> None:
    """Print a recipe."""
    typer.echo(find_example(name).path.read_text(encoding="utf-8"), nl=False)


@recipes.command("copy")
def copy(
    name: Name,
    destination: Annotated[
        Path | None,
        typer.Argument(metavar="DEST", help="File or folder; default: here.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Copy a recipe to edit it. Never overwrites without --force."""
    path = copy_example(name, destination, force=force)
    typed = shlex.quote(str(path))
    typer.echo(f"Wrote {path}\nNext: ndtrain validate {typed} && ndtrain train {typed}")


def schema(
    field: Annotated[
        str | None,
        typer.Option(
            "--field",
            metavar="KEY",
            help="Explain one key, e.g. datasets or datasets.path.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the JSON schema of a recipe, or explain one key."""
    from ndtrain.recipe.json_schema import describe_key, recipe_schema

    if field is None:
        typer.echo(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))
    else:
        typer.echo(describe_key(field))


def env(as_json: AsJson = False) -> None:
    """Versions and devices for a bug report; holds no secrets."""
    from ndtrain.report.commands import env as run

    raise typer.Exit(run(as_json=as_json))
