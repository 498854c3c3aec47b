"""What a finished or running run left in its folder, read back for pages, cards and comparisons."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ndtrain.errors import CheckpointError
from ndtrain.plan.plan import AXES, ParallelPlan
from ndtrain.report.history import History
from ndtrain.report.metrics import read_history
from ndtrain.report.run_directory import RunDirectory


@dataclass(frozen=True)
class RecordedRun:
    """The files of a run in memory; one that is not there yet is empty.

    Attributes:
        resolved_text: `resolved.yaml` with its comments.
        settings: the same as values.
    """

    directory: RunDirectory
    history: History
    recipe_text: str
    resolved_text: str
    settings: Mapping[str, Any]
    plan: Mapping[str, Any]
    env: Mapping[str, Any]
    data: Mapping[str, Any]
    status: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.directory.path.resolve().name

    @property
    def parallel(self) -> ParallelPlan | None:
        """The mesh: as planned, else as the run reported it."""
        sizes = self.plan.get("parallel")
        if sizes is None and self.history.starts:
            sizes = self.history.starts[-1]["mesh"]
        if sizes is None:
            return None
        return ParallelPlan(
            **{axis: sizes.get(axis, 1) for axis in AXES},
            cp_method=sizes.get("cp_method", "none"),
            sequence_parallel=sizes.get("sequence_parallel", False),
            overlaps=sizes.get("overlaps", False),
        )

    @property
    def model_name(self) -> str:
        """The base model as the recipe names it, or the architecture of a random one."""
        base = self.settings.get("base_model")
        if base:
            return str(base)
        config = self.settings.get("model_config") or {}
        return f"random {config.get('model_type', 'model')}"


def read_run(path: Path) -> RecordedRun:
    """Everything recorded in a run directory.

    Raises:
        CheckpointError: it is not a run directory, or one of its files is broken.
    """
    directory = RunDirectory(path)
    if not (directory.metrics.exists() or directory.resolved.exists()):
        raise CheckpointError(
            "is not a run directory: neither metrics.jsonl nor resolved.yaml is in it.",
            where=str(path),
            hint="Name a folder that `ndtrain train` wrote, such as runs/quickstart.",
        )
    resolved = _text(directory.resolved)
    return RecordedRun(
        directory=directory,
        history=read_history(directory.metrics),
        recipe_text=_text(directory.recipe),
        resolved_text=resolved,
        settings=_settings(directory.resolved, resolved),
        plan=_json(directory.plan),
        env=_json(directory.env),
        data=_json(directory.data),
        status=_json(directory.status),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _settings(path: Path, text: str) -> Mapping[str, Any]:
    try:
        settings = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise _broken(path) from error
    return _mapping(settings, path)


def _json(path: Path) -> Mapping[str, Any]:
    text = _text(path)
    if not text.strip():
        return {}
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _broken(path) from error
    return _mapping(content, path)


def _mapping(content: Any, path: Path) -> Mapping[str, Any]:
    # half a file may still be YAML or JSON, of another kind
    if not isinstance(content, Mapping):
        raise _broken(path)
    return content


def _broken(path: Path) -> CheckpointError:
    return CheckpointError(
        "cannot be read: it was changed or cut short.",
        where=str(path),
        hint="Remove it to go on without it.",
    )
