"""The `ndtrain` command: registers the commands and turns failures into messages and exit codes.

Nothing heavy is imported here: `ndtrain --help`, `validate`, `plan`, `recipes` and `schema` start
without torch. Each command imports its work when it runs.
"""

import io
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from ndtrain import __version__
from ndtrain.commands import launching, looking, recipes, results, running
from ndtrain.commands.sections import SectionedGroup
from ndtrain.errors import UNWRITABLE_DISK, ExitCode, NdtrainError

FIRST, RUN, AFTER, ABOUT = "Before the run", "The run", "After the run", "About ndtrain"

app = typer.Typer(
    cls=SectionedGroup,
    name="ndtrain",
    help="Fine-tune language models on any mesh: one recipe, four axes, the same result.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(recipes.recipes, name="recipes", rich_help_panel=FIRST)
app.command(rich_help_panel=FIRST)(looking.validate)
app.command(rich_help_panel=FIRST)(looking.plan)
app.command(rich_help_panel=FIRST)(looking.preprocess)
app.command(rich_help_panel=RUN)(running.train)
app.command(rich_help_panel=RUN)(running.evaluate)
app.command(rich_help_panel=RUN)(running.parity)
app.command(rich_help_panel=RUN)(launching.launch)
app.command(rich_help_panel=AFTER)(results.generate)
app.command(rich_help_panel=AFTER)(results.export)
app.command(rich_help_panel=AFTER)(results.merge)
app.command("merge-lora", hidden=True)(results.merge)
app.command(rich_help_panel=AFTER)(results.compare)
app.command(rich_help_panel=ABOUT)(recipes.schema)
app.command(rich_help_panel=ABOUT)(recipes.env)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ndtrain {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; goes with every command.")
    ] = False,
) -> None:
    context.obj = debug


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave the process with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # In an ASCII locale a "×" in a message is no reason to fail.
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit code. Failures are said on stderr, in one message."""
    ordered, debug = hoist_debug(arguments)
    try:
        app(ordered, prog_name="ndtrain")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return ExitCode.SIGINT
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, code = explain_failure(error)
        print(message, file=sys.stderr)
        return code
    return ExitCode.OK


def hoist_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments with `--debug` in front, wherever it stood, and whether it was there."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    rest = [word for word in arguments[:end] if word != "--debug"] + list(arguments[end:])
    debug = len(rest) < len(arguments)
    return ["--debug", *rest] if debug else rest, debug


def explain_failure(error: Exception) -> tuple[str, ExitCode]:
    """The message and exit code of a failure that reached the top."""
    if isinstance(error, NdtrainError):
        return str(error), error.exit_code
    if isinstance(error, MemoryError):
        hint = "`ndtrain plan` says what the recipe needs."
        return f"this machine ran out of memory. {hint}", ExitCode.MEMORY
    if isinstance(error, OSError) and error.errno in UNWRITABLE_DISK:
        place = f"{error.filename}: " if error.filename else ""
        message = f"{place}{error.strerror}. Free space, or set another output_dir."
        return message, ExitCode.CHECKPOINT
    detail = f"{type(error).__name__}: {error}".rstrip(": ")
    hint = "This is a fault of ndtrain: run again with --debug and report it with `ndtrain env`."
    return f"{detail}\n{hint}", ExitCode.FAULT
