"""Measure ndtrain beside its peers on the same work, in turn, on this machine.

    python benchmarks/speed.py 8b-lora 1b-full [--steps 12] [--out results.json]

Each engine runs in a process of its own; the figure is the median of the steps after the first
four. Ratios compare engines of one run of this script and nothing else. `all_rows.py` runs every
work that has a target, within a time budget.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from engines import (
    Asked,
    our_command,
    peer_command,
    read_ours,
    read_peer,
    tokens_per_second,
    write_recipe,
)
from workloads import WORKS, Work


def run_ndtrain(work: Work, asked: Asked, out: Path | None) -> dict[str, Any]:
    """One run of `ndtrain train`, read from its metrics."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = our_command(write_recipe(work, folder, asked))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"error": (done.stdout + done.stderr)[-1500:]}
        found = read_ours(work, folder, out.parent / "trace.json.gz" if out else None)
        assert found is not None, "a run that has ended has steps"
        if asked.profile:
            print((folder / "run" / "profile.txt").read_text(encoding="utf-8"), flush=True)
        return found


def run_peer(name: str, batch: int, work: Work, asked: Asked) -> dict[str, Any]:
    """One run of a peer in a process of its own."""
    command = peer_command(name, batch, work, asked)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    result = read_peer(name, work, done.stdout)
    if done.returncode or result is None:
        return {"error": (done.stdout + done.stderr)[-1500:]}
    return result


def table(name: str, work: Work, results: dict[str, dict[str, Any]]) -> list[str]:
    """Lines of one work's table: speed per device and our ratio to each engine."""
    lines = [f"## {name}: sequence {work.sequence_len}, {work.ranks} device(s)"]
    ours = results["ndtrain"]
    own_speed = tokens_per_second(ours, work.ranks) if "seconds" in ours else None
    for engine, result in results.items():
        if "seconds" not in result:
            reason = result.get("error") or result.get("not_importable", "")
            lines.append(f"{engine:24} failed: {reason[-400:]}")
            continue
        speed = tokens_per_second(result, work.ranks)
        ratio = f"{own_speed / speed:5.2f}x" if own_speed else "    -"
        lines.append(
            f"{engine:24} {speed:9,.0f} tokens/s/device  "
            f"{result['memory_gib']:6.1f} GiB  ndtrain/it {ratio}  "
            f"first step {result.get('first_step', 0):.1f} s"
        )
    return lines


def main() -> None:
    """Run the works named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("works", nargs="+", choices=sorted(WORKS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print where our step goes")
    parser.add_argument("--rows", type=Path, help="chat rows (.jsonl) for the works on real rows")
    parser.add_argument("--tokenizer", type=Path, help="folder of their tokenizer")
    parser.add_argument("--tiny", action="store_true", help="try a work's keys on a tiny model")
    options = parser.parse_args()
    asked = Asked(options.steps, options.rows, options.tokenizer, options.profile)
    everything = {}
    for name in options.works:
        work = WORKS[name].tiny() if options.tiny else WORKS[name]
        results = {"ndtrain": run_ndtrain(work, asked, options.out)}
        for peer, batch in () if options.no_peers else work.peers:
            results[f"{peer} (batch {batch})"] = run_peer(peer, batch, work, asked)
        everything[name] = results
        print("\n".join(table(name, work, results)), flush=True)
        if options.out:
            options.out.write_text(json.dumps(everything, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
