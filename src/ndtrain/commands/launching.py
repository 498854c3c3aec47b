"""`launch`: job files for schedulers that run the same `ndtrain train`."""

from pathlib import Path
from typing import Annotated

import typer

from ndtrain.commands.options import Overrides, RecipePath

SCHEDULERS = ("slurm", "kubernetes", "kubeflow", "skypilot", "ray")
"""The kinds of `ndtrain.launch.job_files`; by name, so that `--help` need not import them."""


def parse_scheduler(text: str) -> str:
    """One of the schedulers.

    Raises:
        typer.BadParameter: it is none of them.
    """
    if text not in SCHEDULERS:
        raise typer.BadParameter(f"'{text}' is none of {', '.join(SCHEDULERS)}.")
    return text


def launch(
    scheduler: Annotated[
        str,
        typer.Argument(
            parser=parse_scheduler,
            autocompletion=lambda: list(SCHEDULERS),
            metavar="SCHEDULER",
            help="slurm, kubernetes (JobSet), kubeflow (TrainJob), skypilot or ray.",
            show_default=False,
        ),
    ],
    recipe: RecipePath,
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Number of hosts.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, metavar="G", help="GPUs of each host.")] = 8,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write it here instead of printing.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE",
            help="Container with ndtrain, for kubernetes and kubeflow; default: ndtrain:latest.",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Kind of GPU to rent, for skypilot; default: H100.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a commented job file for a scheduler; it runs the same `ndtrain train`."""
    from ndtrain.launch.job_files import write_job
    from ndtrain.recipe.load import load_recipe

    text = write_job(
        scheduler,
        load_recipe(recipe, tuple(overrides or ())),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        write=write,
        options={"image": image, "gpu": gpu},
    )
    if write is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"Wrote {write}; its second line says how to start it.")
