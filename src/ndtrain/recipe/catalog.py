"""The bundled example recipes: found by looking into their folder, never by a list to keep."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from ndtrain.errors import RecipeError
from ndtrain.recipe.output import write_named
from ndtrain.recipe.problem import nearest

SCHEMA_FILE = "recipe.schema.json"
"""The committed JSON schema, beside the examples."""

_SCHEMA_LINE = re.compile(r"(?m)^(?P<head># yaml-language-server: \$schema=)(?P<place>.+)$")

_KEY_LINE = re.compile(r"^(?P<key>[a-z_0-9]+):\s*(?P<value>[^#\n]*)")
_SIZES = (
    "dp_replicate_size",
    "dp_shard_size",
    "context_parallel_size",
    "tensor_parallel_size",
)


@dataclass(frozen=True)
class Example:
    """One bundled recipe.

    Attributes:
        title: its first comment line.
        model: short name of the base model.
        method: `full`, `lora` or `qlora`.
        mesh: axis sizes above 1, such as `dp_shard 4 × tp 2`.
        gpus: ranks that the recipe asks for; 0 when it is made for the CPU.
    """

    name: str
    path: Path
    title: str
    model: str
    method: str
    mesh: str
    gpus: int


def examples_folder() -> Path:
    """Where the examples lie: inside the installed package, or beside `src/` in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "examples"
    return inside if inside.is_dir() else package.parent.parent / "examples"


def list_examples() -> tuple[Example, ...]:
    """All bundled recipes; the quickstart first, then by name."""
    examples = [_read(path) for path in examples_folder().glob("*.yaml")]
    return tuple(sorted(examples, key=lambda one: (one.name != "quickstart", one.name)))


def find_example(name: str) -> Example:
    """The recipe called `name`, with or without `.yaml`.

    Raises:
        RecipeError: there is none.
    """
    wanted = name.removesuffix(".yaml")
    examples = {example.name: example for example in list_examples()}
    if wanted in examples:
        return examples[wanted]
    close = nearest(wanted, examples)
    hint = f"Did you mean '{close}'?" if close else "`ndtrain recipes` lists them."
    raise RecipeError(f"there is no bundled recipe '{name}'.", hint=hint)


def copy_example(name: str, destination: Path | None = None, *, force: bool = False) -> Path:
    """Copy a bundled recipe to a file, or into a folder; returns the file.

    The copy's schema line points at the installed schema, so that editors still find it.

    Raises:
        RecipeError: there is no such recipe, or the file exists and `force` is not given.
    """
    example = find_example(name)
    target = destination or Path(example.path.name)
    if target.is_dir():
        target = target / example.path.name
    keep = "" if force else "Overwrite it with --force."
    write_named(target, _text_for(example, target), option="or folder", hint_to_replace=keep)
    return target


def _text_for(example: Example, target: Path) -> str:
    text = example.path.read_text(encoding="utf-8")
    if target.resolve().parent == example.path.parent:
        return text
    schema = (example.path.parent / SCHEMA_FILE).as_posix()
    return text.replace(f"$schema={SCHEMA_FILE}", f"$schema={schema}", 1)


def without_local_schema(text: str) -> str:
    """A recipe as it can be given away: its schema line names no folder of this machine."""
    return _SCHEMA_LINE.sub(_public_schema, text)


def _public_schema(line: re.Match[str]) -> str:
    place = line["place"].strip()
    return line[0] if "://" in place else line["head"] + re.split(r"[/\\]", place)[-1]


def _read(path: Path) -> Example:
    """What the listing shows, from the top-level lines alone: a full load would be slower."""
    lines = path.read_text(encoding="utf-8").splitlines()
    values = {
        found["key"]: found["value"].strip().strip("\"'")
        for found in map(_KEY_LINE.match, lines)
        if found
    }
    sizes = [int(values.get(size) or 1) for size in _SIZES]
    axes = zip(("dp_replicate", "dp_shard", "cp", "tp"), sizes, strict=True)
    # a recipe that is made for the CPU may still take a GPU where there is one
    opening = " ".join(takewhile(lambda line: line.startswith("#"), lines))
    on_cpu = values.get("device") == "cpu" or "no gpu" in opening.lower()
    gpus = 0 if on_cpu else sizes[0] * sizes[1] * sizes[2] * sizes[3]
    return Example(
        name=path.stem,
        path=path,
        title=lines[0].lstrip("# "),
        model=_short_model(values),
        method=values.get("adapter") or "full",
        mesh=" × ".join(f"{axis} {size}" for axis, size in axes if size > 1) or "one rank",
        gpus=gpus,
    )


def _short_model(values: Mapping[str, str]) -> str:
    name = values.get("base_model") or "random weights"
    return re.sub(r"\.[A-Za-z0-9_]+\.gguf$", "", name.rpartition("/")[2])
