"""`ndtrain plan`, as a function the command line calls."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ndtrain.environment import no_color
from ndtrain.errors import ExitCode, RecipeError
from ndtrain.plan.apply import chosen_keys, set_keys
from ndtrain.plan.hardware import GIB
from ndtrain.plan.machines import Machines, machines_here
from ndtrain.plan.measured import MeasuredMachine, write_measured
from ndtrain.plan.planning import plan_json, plan_recipe, plan_text
from ndtrain.plan.plot import draw_plan
from ndtrain.plan.search import Candidate
from ndtrain.plan.setting import Setting
from ndtrain.recipe.load import LoadedRecipe, load_recipe
from ndtrain.recipe.output import write_named
from ndtrain.recipe.schema import Recipe

ExactMemory = Callable[[LoadedRecipe, Setting], float]
"""Measures the bytes a setting reserves on a simulated device; lives in a higher layer."""

MeasureMachine = Callable[[Recipe, int | None], MeasuredMachine]
"""Measures this machine for a number of ranks; needs torch, and so lives in a higher layer."""
_TOP = 5
_FILE_WIDTH = 120
_ASSUMED_GPU = "h100-80"


def plan(
    recipe: Path,
    *,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    gpu: str | None = None,
    nodes: int | None = None,
    intra: str | None = None,
    inter: str | None = None,
    top: int | None = None,
    details: bool = False,
    exact: ExactMemory | None = None,
    measure: MeasureMachine | None = None,
    as_json: bool = False,
    plot: Path | None = None,
    apply: int | None = None,
    write: Path | None = None,
) -> ExitCode:
    """Predict memory and speed of every mesh for some GPUs, print the best and why.

    Args:
        world_size: number of GPUs; default: those of this machine, else what the recipe asks for.
        intra: link inside a node, from the hardware book.
        inter: link between nodes.
        top: how many meshes to show.
        details: also show memory, seconds and exchanged bytes by part.
        exact: measures the memory of one setting with a simulated device; needs torch.
        measure: first measures this machine, and keeps its rates for this and later plans.
        plot: file for a picture of memory and speed over model size and sequence length.
        apply: number in the list whose sizes are written into the recipe.
        write: where the changed recipe goes; default: printed.

    Raises:
        NdtrainError: the recipe, an option or the model is wrong, or nothing can be planned.
    """
    loaded = load_recipe(recipe, overrides, check=False)
    machines = machines_here(world_size, gpu, nodes, intra, inter)
    if measure is not None:
        _measure(measure, loaded, machines)
    planned = plan_recipe(loaded, machines, assumed_gpu=_ASSUMED_GPU)
    shown = planned.candidates[: top or _TOP]
    if apply is not None and write is None:
        _print_applied(loaded, planned.pick(apply))
        return ExitCode.OK
    if as_json:
        print(json.dumps(plan_json(planned, shown), indent=2, ensure_ascii=False, default=str))
    else:
        console = _console()
        for part in plan_text(planned, shown, details=details):
            console.print(part)
        if exact is not None:
            measured = exact(loaded, shown[0].setting)
            console.print(
                f"#1 on a simulated device: {measured / GIB:.1f} GiB reserved, predicted "
                f"{shown[0].memory.reserved / GIB:.1f}."
            )
    if plot is not None:
        write_named(plot, draw_plan(planned), option="with --plot")
    if apply is not None and write is not None:
        candidate = planned.pick(apply)
        text = set_keys(loaded.text, chosen_keys(loaded.recipe, candidate), where=str(recipe))
        write_named(write, text, option="with --write")
        print(f"{candidate.parallel} written to {write}.", file=sys.stderr)
    return ExitCode.OK


def _console() -> Console:
    console = Console(no_color=no_color() or None, highlight=False, soft_wrap=True, markup=False)
    # A pipe or a file has no width of its own: give tables room.
    return (
        console
        if console.is_terminal
        else Console(
            no_color=True, highlight=False, soft_wrap=True, markup=False, width=_FILE_WIDTH
        )
    )


def _measure(measure: MeasureMachine, loaded: LoadedRecipe, machines: Machines) -> None:
    """Measure and keep; said on stderr, so that `--json` stays JSON."""
    if machines.gpu is not None:
        raise RecipeError(
            f"--measure measures this machine, and --gpu {machines.gpu} asks for another.",
            where="--measure",
            hint="Leave one of them out.",
        )
    per_node = None if machines.world_size is None else machines.world_size // (machines.nodes or 1)
    rates = measure(loaded.recipe, per_node)
    path = write_measured(rates)
    print(f"measured {rates.describe()}; kept in {path}.", file=sys.stderr)


def _print_applied(loaded: LoadedRecipe, candidate: Candidate) -> None:
    keys = chosen_keys(loaded.recipe, candidate)
    print(set_keys(loaded.text, keys, where=str(loaded.path)), end="")
