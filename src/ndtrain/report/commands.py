"""`ndtrain compare` and `ndtrain env`."""

import json
import sys
from pathlib import Path
from typing import TextIO

from ndtrain.errors import ExitCode
from ndtrain.recipe.output import write_named
from ndtrain.report.comparison import comparison_json, comparison_lines, draw_both
from ndtrain.report.machine import describe_machine
from ndtrain.report.metrics import encode_record
from ndtrain.report.recorded import read_run


def env(*, as_json: bool = False, stream: TextIO | None = None) -> ExitCode:
    """Print versions and devices for a bug report; never variables, paths or user names."""
    stream = stream or sys.stdout
    facts = describe_machine()
    if as_json:
        stream.write(json.dumps(facts, indent=2) + "\n")
        return ExitCode.OK
    rows = [(name, facts[name]) for name in ("ndtrain", "python", "platform", "cpu_count")]
    rows.append(("memory", f"{facts['host_memory_gib']} GiB"))
    rows.extend(facts["packages"].items())
    rows.append(("CUDA", facts["cuda"] or "none: this torch is built for the CPU"))
    rows.extend(
        (f"GPU {place}", ", ".join(gpu.values())) for place, gpu in enumerate(facts["gpus"])
    )
    if not facts["gpus"]:
        rows.append(("GPU", "none"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        stream.write(f"{name:<{width}}  {value}\n")
    return ExitCode.OK


def compare(
    run_a: Path,
    run_b: Path,
    *,
    plot: Path | None = None,
    as_json: bool = False,
    stream: TextIO | None = None,
) -> ExitCode:
    """Print which settings of two runs differ and how far their losses are apart.

    Args:
        run_a: a run directory.
        run_b: another one.
        plot: where to draw both losses, if anywhere.
        as_json: print one JSON object, with every float in full.
        stream: where the lines go, standard output by default.

    Raises:
        CheckpointError: one of them is not a run directory.
    """
    stream = stream or sys.stdout
    first, second = read_run(run_a), read_run(run_b)
    if as_json:
        stream.write(encode_record(comparison_json(first, second), indent=2) + "\n")
    else:
        for line in comparison_lines(first, second):
            stream.write(line + "\n")
    if plot is not None:
        write_named(plot, draw_both(first, second) + "\n", option="with --plot")
    if plot is not None and not as_json:
        stream.write(f"drawn   {plot}\n")
    return ExitCode.OK
