"""Arguments and options that several commands share, and how their texts are read."""

import re
from pathlib import Path
from typing import Annotated

import typer

RecipePath = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="Recipe file (YAML).", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key, e.g. learning_rate=1e-5 or datasets.0.path=a.jsonl; repeatable.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WorldSize = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Number of ranks to plan for.", show_default=False),
]
Gpu = Annotated[
    str | None,
    typer.Option(metavar="NAME|80GB", help="Device to plan for, e.g. h100-80.", show_default=False),
]
Nodes = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Number of hosts.", show_default=False)
]

_DURATION = re.compile(
    r"^(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?(?:(?P<s>\d+(?:\.\d+)?)s)?$"
    # a number alone is seconds; behind a unit it might be meant as the next smaller one
    r"|^(?P<alone>\d+(?:\.\d+)?)$"
)


def parse_duration(text: str) -> float:
    """Seconds of `3h50m`, `90m`, `2d`, `45s` or plain seconds.

    Raises:
        typer.BadParameter: it is none of these, or not above zero.
    """
    found = _DURATION.match(text.strip())
    if text.strip() and found:
        parts = {unit: float(value) for unit, value in found.groupdict().items() if value}
        seconds = sum(
            parts.get(unit, 0.0) * size
            for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1), ("alone", 1))
        )
        if seconds > 0:
            return seconds
    raise typer.BadParameter(f"'{text}' is not a duration; write for example 3h50m or 90m.")
