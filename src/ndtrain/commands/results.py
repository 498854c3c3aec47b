"""`generate`, `export`, `merge` and `compare`: what a finished run is good for."""

from pathlib import Path
from typing import Annotated

import typer

from ndtrain.commands.options import AsJson

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)]
Destination = Annotated[
    Path, typer.Argument(metavar="DEST", help="Folder to write.", show_default=False)
]


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Run, export, adapter, hub id, folder, .gguf or package://.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Prompt; repeatable.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="One prompt a line.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Longest answer in tokens.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, metavar="T", help="0 = the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, metavar="P", help="Nucleus sampling.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="Seed of sampling.")] = 42,
    chat: Annotated[bool, typer.Option("--chat", help="Talk in several turns.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="No chat template or instruction form around a prompt.")
    ] = False,
    tensor_parallel_size: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Split the model over N devices (or processes)."),
    ] = 1,
) -> None:
    """Answer prompts with a base model, a run or an export."""
    from ndtrain.train.generate_command import generate as run

    raise typer.Exit(
        run(
            model,
            prompt=tuple(prompt or ()),
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            chat=chat,
            raw=raw,
            tensor_parallel_size=tensor_parallel_size,
        )
    )


def export(
    run: RunPath,
    destination: Destination,
    dtype: Annotated[
        str, typer.Option(metavar="bf16|fp32", help="Precision of the written weights.")
    ] = "bf16",
    push_to: Annotated[
        str | None,
        typer.Option(metavar="REPO", help="Also push to this hub repo.", show_default=False),
    ] = None,
) -> None:
    """Write a run's newest checkpoint as a folder that transformers loads."""
    from ndtrain.train.export_command import export as write

    raise typer.Exit(write(run, destination, dtype=dtype, push_to=push_to))


def merge(
    run: RunPath,
    destination: Destination,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="bf16|fp32",
            help="Precision of the written weights; the base's by default.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the base model with the run's adapter merged in."""
    from ndtrain.train.merge import merge as write

    raise typer.Exit(write(run, destination, dtype=dtype))


def compare(
    run: RunPath,
    other: Annotated[
        Path, typer.Argument(metavar="RUN", help="The other one.", show_default=False)
    ],
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Draw both losses.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What differs between two runs, and both loss curves."""
    from ndtrain.report.commands import compare as show

    raise typer.Exit(show(run, other, plot=plot, as_json=as_json))
