"""`train`, `evaluate` and `parity`: the commands that run a model's forward and backward."""

from pathlib import Path
from typing import Annotated

import typer

from ndtrain.commands.options import Overrides, RecipePath, parse_duration


def train(
    context: typer.Context,
    recipe: RecipePath,
    overrides: Overrides = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Ranks on this machine; default: what the recipe's sizes ask for.",
            show_default=False,
        ),
    ] = None,
    nnodes: Annotated[int, typer.Option(min=1, metavar="N", help="Number of hosts.")] = 1,
    node_rank: Annotated[
        int, typer.Option(min=0, metavar="R", help="This host's number, from 0.")
    ] = 0,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where the hosts meet: host 0.", show_default=False),
    ] = None,
    resume: Annotated[
        str, typer.Option(metavar="auto|never|PATH", help="Which checkpoint to continue from.")
    ] = "auto",
    restart: Annotated[
        bool, typer.Option("--restart", help="Move an earlier run aside and start anew.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and stop before any training.")
    ] = False,
    max_steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Stop after step N.", show_default=False),
    ] = None,
    max_time: Annotated[
        float | None,
        typer.Option(
            metavar="3h50m",
            parser=parse_duration,
            help="Save and stop after this long (exit 143).",
            show_default=False,
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="Restarts after a lost rank.")
    ] = 0,
    sweep: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Run once for each set of values.", show_default=False),
    ] = None,
) -> None:
    """Fine-tune the recipe's model. The same command again continues the run."""
    from ndtrain.train.command import train as run

    code = run(
        recipe,
        overrides=tuple(overrides or ()),
        nproc_per_node=nproc_per_node,
        nnodes=nnodes,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
        resume=resume,
        restart=restart,
        dry_run=dry_run,
        max_steps=max_steps,
        max_seconds=max_time,
        max_restarts=max_restarts,
        sweep=sweep,
        debug=bool(context.obj),
    )
    raise typer.Exit(code)


def evaluate(
    context: typer.Context,
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|RUN", help="Recipe file, or a run directory.", show_default=False
        ),
    ],
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH|base",
            help="A checkpoint, or the base model; default: the newest checkpoint.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...",
            help="Run lm-evaluation-harness tasks instead; repeatable.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Questions of each task.", show_default=False),
    ] = None,
) -> None:
    """Evaluation loss of a checkpoint, or of the base model."""
    from ndtrain.train.evaluate import evaluate as run

    code = run(
        recipe,
        overrides=tuple(overrides or ()),
        checkpoint=checkpoint,
        debug=bool(context.obj),
        tasks=tuple(tasks or ()),
        limit=limit,
    )
    raise typer.Exit(code)


def parity(
    context: typer.Context,
    recipe: RecipePath,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps to compare.")] = 3,
) -> None:
    """Prove that the recipe's mesh gives one process's losses, on a shrunk model."""
    from ndtrain.train.parity import parity as run

    raise typer.Exit(
        run(recipe, overrides=tuple(overrides or ()), steps=steps, debug=bool(context.obj))
    )
