"""Write docs/reference/commands.md and architectures.md from the code; `--check` only compares."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from ndtrain.cli import app
from ndtrain.plan.checks import sequence_problem
from ndtrain.plan.facts import facts_from_config
from ndtrain.plan.families import FAMILIES
from ndtrain.plan.support import SUPPORTED

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
WRITTEN = "Written from the code by `python docs/scripts/reference_pages.py`; do not edit."


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def leaves(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that can be run, with its words; a group's default comes first."""
    children = getattr(command, "commands", None)
    if children is None:
        yield words, command
        return
    for name, child in children.items():
        if not child.hidden:
            yield from leaves(child, (*words, name))


def options(command: Any) -> Iterator[str]:
    """A table row for each argument and option."""
    for one in command.params:
        if one.param_type_name == "argument":
            name = one.metavar or one.name.upper()
        else:
            name = ", ".join([*one.opts, *one.secondary_opts])
            if not one.is_flag:
                name += f" {one.metavar or one.type.name.upper()}"
        default = getattr(one, "show_default", False) and one.default not in (None, False)
        shown = f" Default: {one.default}." if default else ""
        yield f"| `{cell(name)}` | {cell((one.help or '') + shown)} |"


def commands_page() -> Iterator[str]:
    """The page on commands."""
    yield f"# Commands\n\n{WRITTEN}\n"
    yield "`--debug` (tracebacks) goes with every command. `ndtrain COMMAND --help` says the same."
    for words, command in leaves(get_command(app), ("ndtrain",)):
        yield f"\n## {' '.join(words)}\n\n{' '.join((command.help or '').split())}"
        rows = list(options(command))
        if rows:
            yield "\n| argument or option | meaning |\n|---|---|"
            yield from rows


def architectures_page() -> Iterator[str]:
    """The page on architectures."""
    yield f"# Architectures\n\n{WRITTEN}\n"
    yield "By `model_type` of the model's config.json. Others work where transformers describes"
    yield "their blocks; `ndtrain validate` says when one is not among these. Such a model is"
    yield "looked at before it trains, and refused with exit code 3 where ndtrain would compute"
    yield "another one than transformers: a window that only its mask knows, layers between the"
    yield "hidden states and the head, an attention that does not hand its keyword arguments on, or"
    yield "blocks that are not kept in a list called `layers`, as in `gpt2`. Models in which tokens"
    yield "also meet outside attention, in convolutions, recurrent states or a sparse choice, such"
    yield "as `lfm2`, `jamba` and `qwen3_next`, train with `context_parallel_size: 1`.\n"
    yield "| model_type | attention under tp | feed-forward under tp | between them | special |"
    yield "|---|---|---|---|---|"
    words = {"heads": "by heads", "gathered": "by columns, gathered", "none": "repeated"}
    for name, family in sorted(FAMILIES.items()):
        special = {
            "norms of queries and keys": family.qk_norm != "none",
            "fused q, k, v": family.fused_qkv,
            "fused gate and up": family.fused_gate_up,
            "sliding window in some layers": bool(family.window_every),
            "attention sinks": family.sinks,
            "latent attention": family.mla,
        }
        notes = ", ".join(text for text, has in special.items() if has)
        split = "split" if family.tp_mlp else "repeated"
        facts = facts_from_config({"model_type": name}, name=name, source="recipe")
        tokens = "repeated" if sequence_problem(facts) else "tokens shared"
        yield f"| `{name}` | {words[family.tp_attention]} | {split} | {tokens} | {notes} |"
    yield "\n## Attention beyond plain causal\n"
    yield "| kind | one rank a row | Ulysses | all-gather |\n|---|---|---|---|"
    for kind, situations in SUPPORTED.items():
        cells = [
            ("yes" if one.works else "refused") + (f": {one.note}" if one.note else "")
            for one in (situations["alone"], situations["ulysses"], situations["allgather"])
        ]
        yield f"| {kind} | {' | '.join(map(cell, cells))} |"


def main() -> int:
    """Write or check both pages; returns the exit code."""
    pages = {"commands.md": commands_page, "architectures.md": architectures_page}
    stale = []
    for name, lines in pages.items():
        text = "\n".join(lines()) + "\n"
        path = REFERENCE / name
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        print(f"stale: {', '.join(stale)}; run python docs/scripts/reference_pages.py")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
