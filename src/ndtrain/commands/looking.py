"""`validate`, `plan` and `preprocess`: everything that can be known before training."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ndtrain.commands.options import (
    AsJson,
    Gpu,
    Nodes,
    Overrides,
    RecipePath,
    WorldSize,
)


def validate(
    recipe: RecipePath,
    overrides: Overrides = None,
    world_size: WorldSize = None,
    gpu: Gpu = None,
    nodes: Nodes = None,
    data: Annotated[bool, typer.Option("--data", help="Also read every row.")] = False,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="axolotl",
            help="Report what becomes of each key of a foreign recipe.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check keys, rules, files, mesh and memory in under a second, without a GPU."""
    if from_ is not None:
        from ndtrain.commands.foreign import report_foreign

        raise typer.Exit(report_foreign(recipe, from_, tuple(overrides or ()), as_json=as_json))
    from ndtrain.plan.validate_command import validate as run

    report: Any = None
    if data:
        from ndtrain.commands.data import data_report, data_summary

        report = data_report if as_json else data_summary
    raise typer.Exit(
        run(
            recipe,
            overrides=tuple(overrides or ()),
            world_size=world_size,
            gpu=gpu,
            nodes=nodes,
            data_report=report,
            as_json=as_json,
        )
    )


def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    world_size: WorldSize = None,
    gpu: Gpu = None,
    nodes: Nodes = None,
    intra: Annotated[
        str | None,
        typer.Option(metavar="LINK", help="Link inside a host, e.g. nvlink4.", show_default=False),
    ] = None,
    inter: Annotated[
        str | None,
        typer.Option(metavar="LINK", help="Link between hosts, e.g. ib-ndr.", show_default=False),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="Show the K best meshes.", show_default=False),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Show memory, time and exchanges by part.")
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Measure memory on a simulated device.")
    ] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="First measure this machine, and keep its rates."),
    ] = False,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Draw mesh and memory.", show_default=False),
    ] = None,
    apply: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Take mesh N of the list.", show_default=False),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the recipe with it.", show_default=False),
    ] = None,
) -> None:
    """Mesh, batch arithmetic, memory and time of a run, and better meshes for it."""
    from ndtrain.plan.plan_command import plan as run

    exact_memory: Any = None
    if exact:
        from ndtrain.train.exact_memory import exact_memory
    measure_machine: Any = None
    if measure:
        from ndtrain.train.measure import measure_machine
    raise typer.Exit(
        run(
            recipe,
            overrides=tuple(overrides or ()),
            world_size=world_size,
            gpu=gpu,
            nodes=nodes,
            intra=intra,
            inter=inter,
            top=top,
            details=details,
            exact=exact_memory,
            measure=measure_machine,
            as_json=as_json,
            plot=plot,
            apply=apply,
            write=write,
        )
    )


def preprocess(
    recipe: RecipePath,
    overrides: Overrides = None,
    show: Annotated[
        int, typer.Option(min=0, metavar="N", help="Print N rows, trained tokens marked.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Tokenise the recipe's rows, count them and show what is trained on."""
    from ndtrain.commands.data import preprocess as run

    raise typer.Exit(run(recipe, overrides=tuple(overrides or ()), show=show, as_json=as_json))
