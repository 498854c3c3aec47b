"""`ndtrain validate`, as a function the command line calls.

It has half a second, and so it does without rich and without what only `plan` needs.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ndtrain.environment import no_color
from ndtrain.errors import ExitCode, NdtrainError, Problems
from ndtrain.plan.decide import combine
from ndtrain.plan.machines import machines_here
from ndtrain.plan.report import (
    describe_model,
    describe_plan,
    describe_prediction,
    problem_json,
    validation_json,
)
from ndtrain.plan.validate import validate_recipe
from ndtrain.recipe.load import LoadedRecipe, load_recipe

DataReport = Callable[[LoadedRecipe], Mapping[str, object]]
"""Prepares a recipe's data and says what came out; lives in a higher layer."""

_YELLOW, _GREEN = 33, 32


def validate(
    recipe: Path,
    *,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    gpu: str | None = None,
    nodes: int | None = None,
    data_report: DataReport | None = None,
    as_json: bool = False,
) -> ExitCode:
    """Check a recipe without weights, GPU or torch and print what was found.

    Args:
        world_size: ranks that will be started; default: the GPUs found, else what the sizes give.
        gpu: a GPU of the hardware book, or a memory size such as `80GB`.
        nodes: machines the ranks are spread over.
        data_report: with `--data`, what prepares the rows and reports on them.
        as_json: print one JSON object; problems are then in it, and only the exit code tells.

    Raises:
        NdtrainError: what is wrong, unless `as_json`.
    """
    try:
        loaded = load_recipe(recipe, overrides, check=False)
    except NdtrainError as error:
        if not as_json:
            raise
        return _print_json_failure(error)
    found = validate_recipe(loaded, machines_here(world_size, gpu, nodes))
    if data_report is not None and not found.problems:
        found = replace(found, data=data_report(loaded))
    if as_json:
        result = validation_json(loaded.recipe, found)
        print(json.dumps(result, indent=2, ensure_ascii=False, default=str))
        return ExitCode(result["exit_code"])
    if found.facts is not None:
        print(describe_model(found.facts))
    if found.plan is not None:
        for line in describe_plan(loaded.recipe, found.plan):
            print(line)
    if found.predicted is not None and found.cluster is not None:
        print(describe_prediction(found.predicted, found.cluster))
    for notice in found.notices:
        print(f"note: {notice}")
    for warning in found.warnings:
        print(_coloured(f"warning: {warning}", _YELLOW))
    for key, value in found.data.items():
        print(f"{key}: {value}")
    if found.problems:
        raise combine(list(found.problems))
    unread = "" if data_report else " Its rows were not read; --data reads them too."
    print(_coloured(f"{recipe} is valid.{unread}", _GREEN))
    return ExitCode.OK


def _coloured(line: str, colour: int) -> str:
    """The line as a terminal shows it; a pipe, or NO_COLOR, gets it plain."""
    return line if no_color() or not sys.stdout.isatty() else f"\x1b[{colour}m{line}\x1b[0m"


def _print_json_failure(error: NdtrainError) -> ExitCode:
    problems = error.problems if isinstance(error, Problems) else [error]
    result = {
        "ok": False,
        "exit_code": int(error.exit_code),
        "problems": [problem_json(problem) for problem in problems],
        "warnings": [],
        "notices": [],
    }
    print(json.dumps(result, indent=2, ensure_ascii=False))
    return ExitCode(error.exit_code)
