"""The folder of a run: where each file stands and how it is written."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from ndtrain.errors import CheckpointError
from ndtrain.plan.plan import Plan
from ndtrain.recipe.schema import Recipe
from ndtrain.report.atomic import replace_text, write_failure
from ndtrain.report.machine import describe_machine
from ndtrain.report.resolved import render_resolved

FORMAT_VERSION = 1
"""Version of the JSON files; raised when a reader must know that their shape changed."""


@dataclass(frozen=True)
class RunDirectory:
    """Everything a run leaves behind; writing is atomic, reading needs no other file."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The recipe as given."""
        return self.path / "recipe.yaml"

    @property
    def resolved(self) -> Path:
        """Every value of the recipe, with where it came from."""
        return self.path / "resolved.yaml"

    @property
    def plan(self) -> Path:
        """Mesh, batch arithmetic, rank table and planned memory."""
        return self.path / "plan.json"

    @property
    def env(self) -> Path:
        """Versions and devices."""
        return self.path / "env.json"

    @property
    def data(self) -> Path:
        """Counts of the prepared rows."""
        return self.path / "data.json"

    @property
    def status(self) -> Path:
        """State, step, exit code, last error and heartbeat."""
        return self.path / "status.json"

    @property
    def metrics(self) -> Path:
        """One event a line."""
        return self.path / "metrics.jsonl"

    @property
    def loss_svg(self) -> Path:
        """The loss curve."""
        return self.path / "loss.svg"

    @property
    def report_html(self) -> Path:
        """Everything to look at, in one page."""
        return self.path / "report.html"

    @property
    def profile(self) -> Path:
        """Where the profiled steps went, in words."""
        return self.path / "profile.txt"

    @property
    def trace(self) -> Path:
        """The profiled steps as a Chrome trace."""
        return self.path / "trace.json.gz"

    @property
    def logs(self) -> Path:
        """Folder of one log a rank."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """Folder that `from_pretrained` loads."""
        return self.path / "export"

    def log_of(self, rank: int) -> Path:
        """Where `rank` logs."""
        return self.logs / f"rank-{rank}.log"

    def create(self) -> None:
        """Make the folders and prove that they can be written, before anything costly starts.

        Raises:
            CheckpointError: they cannot.
        """
        probe = self.path / ".writable"
        try:
            for folder in (self.path, self.logs, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            # A byte, not an empty file: a full disk still makes empty ones.
            probe.write_bytes(b"\n")
            probe.unlink()
        except OSError as error:
            raise write_failure(self.path, error) from error

    def set_aside(self) -> Path | None:
        """Move an older run out of the way, to `<name>.1` or the next free number.

        Returns:
            Where it stands now; None when there was nothing to move.
        """
        if not self.path.exists():
            return None
        whole, here = self.path.resolve(), Path.cwd()
        if whole == here or whole in here.parents:
            raise CheckpointError(
                "is the folder where you are, or one above it, and cannot be moved aside.",
                where=str(self.path),
                hint="Set output_dir to a folder of the run's own, such as runs/first.",
            )
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        try:
            self.path.rename(aside)
        except OSError as error:
            raise CheckpointError(
                f"cannot be moved to '{aside}': {error.strerror}.",
                where=str(self.path),
                hint="Move it by hand, or set output_dir to another folder.",
            ) from error
        return aside

    def write_recipe(self, text: str) -> None:
        """Keep the recipe as the user wrote it."""
        replace_text(self.recipe, text)

    def write_resolved(self, recipe: Recipe, origins: Mapping[str, str]) -> None:
        """Keep every value; the file is a recipe that runs the same again."""
        replace_text(self.resolved, render_resolved(recipe, origins))

    def write_plan(
        self, plan: Plan, *, hosts: Sequence[str] = (), extra: Mapping[str, Any] | None = None
    ) -> None:
        """Keep what was decided before launch.

        Args:
            plan: the plan of the run.
            hosts: host of each rank; empty when all run here.
            extra: further parts to keep, e.g. `{"memory": planned bytes by part}`.
        """
        parallel = plan.parallel
        places = hosts or (platform.node(),) * parallel.world_size
        ranks = [
            {"rank": rank, "host": host, **parallel.coordinates(rank)}
            for rank, host in enumerate(places)
        ]
        content = {
            "v": FORMAT_VERSION,
            **_plain(plan),
            "world_size": parallel.world_size,
            "global_batch": plan.batch.global_batch,
            "ranks": ranks,
            **_plain(extra or {}),
        }
        self._write_json(self.plan, content)

    def write_data(self, report: object) -> None:
        """Keep the counts of the prepared rows (a dataclass or a mapping)."""
        self._write_json(self.data, {"v": FORMAT_VERSION, **_plain(report)})

    def write_env(self) -> None:
        """Keep versions and devices."""
        self._write_json(self.env, {"v": FORMAT_VERSION, **describe_machine()})

    def _write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        replace_text(path, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")


def _plain(value: object) -> dict[str, Any]:
    """A dataclass or a mapping as a dictionary, dataclasses inside included."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {
            str(key): asdict(part) if is_dataclass(part) and not isinstance(part, type) else part
            for key, part in value.items()
        }
    raise TypeError(f"Expected a dataclass or a mapping, got {type(value).__name__}.")
