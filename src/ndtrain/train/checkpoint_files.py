"""Checkpoints as folders: naming, the COMPLETE marker, the newest whole one, rotation.

A checkpoint is written under a hidden name, fsynced, given a `COMPLETE` marker that lists every
file with its size, and renamed to `step-000200` last. So a folder with that name is either whole
or damaged afterwards, and damage shows against the sizes. Nothing here needs torch.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ndtrain.errors import CheckpointError

FORMAT_VERSION = 1
MARKER = "COMPLETE"
META = "meta.json"

_NAME = re.compile(r"step-(\d+)")
_UNFINISHED_PREFIX = ".unfinished-"
_OUTDATED_PREFIX = ".outdated-"


@dataclass(frozen=True)
class FoundCheckpoint:
    """A whole checkpoint on disk.

    Attributes:
        meta: what stands in its meta.json: progress, mesh, versions, resolved recipe.
        skipped: newer folders that were passed over, each with the reason.
    """

    path: Path
    step: int
    meta: Mapping[str, Any]
    skipped: tuple[str, ...] = ()


def final_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` stands once it is complete."""
    return folder / f"step-{step:06d}"


def unfinished_path(folder: Path, step: int) -> Path:
    """Where it is written until then."""
    return folder / f"{_UNFINISHED_PREFIX}{final_path(folder, step).name}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name, None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def seal(unfinished: Path, meta: Mapping[str, Any], *, replaces: Path) -> None:
    """Make a fully written folder a checkpoint: meta, fsync, marker, rename.

    Args:
        replaces: the final path; what this run has there is removed once the new one is in
            place, another run's is renamed.
    """
    _write_durably(unfinished / META, json.dumps(meta, indent=1))
    sizes = {file.name: file.stat().st_size for file in sorted(unfinished.iterdir())}
    sync_folder(unfinished)
    _write_durably(unfinished / MARKER, json.dumps({"format": FORMAT_VERSION, "files": sizes}))
    sync_folder(unfinished)
    outdated = replaces.with_name(f"{_OUTDATED_PREFIX}{replaces.name}")
    if replaces.exists():
        owner = _owner(replaces)
        if owner not in (None, meta.get("run_id")):
            replaces.rename(replaces.with_name(f"{replaces.name}.of-{owner}"))
        else:
            shutil.rmtree(outdated, ignore_errors=True)
            replaces.rename(outdated)
    unfinished.rename(replaces)
    sync_folder(replaces.parent)
    shutil.rmtree(outdated, ignore_errors=True)


def _owner(path: Path) -> str | None:
    """The run to which a whole checkpoint belongs, None for a damaged one."""
    try:
        return str(read_checkpoint(path).meta.get("run_id"))
    except CheckpointError:
        return None


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(path: Path) -> str | None:
    """Why the checkpoint cannot be used, None when it is whole."""
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        version, sizes = int(marker["format"]), dict(marker["files"])
    except FileNotFoundError:
        return f"it has no {MARKER} marker"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {MARKER} marker cannot be read ({type(error).__name__})"
    if version > FORMAT_VERSION:
        return f"its format {version} is newer than this ndtrain reads ({FORMAT_VERSION})"
    for name, size in sizes.items():
        try:
            actual = (path / name).stat().st_size
        except OSError as error:
            return f"'{name}' is missing ({error.strerror})"
        if actual != size:
            return f"'{name}' has {actual} bytes instead of {size}"
    return None


def read_checkpoint(path: Path) -> FoundCheckpoint:
    """The checkpoint at `path`.

    Raises:
        CheckpointError: it does not exist or is not whole.
    """
    step = step_of(path)
    if step is None or not path.is_dir():
        raise CheckpointError(
            "There is no checkpoint.",
            where=str(path),
            hint="Name a folder like checkpoints/step-000200 of a run directory.",
        )
    if reason := damage(path):
        raise CheckpointError(
            f"This checkpoint cannot be used: {reason}.",
            where=str(path),
            hint="Choose another one, or continue with --resume auto, which takes the newest "
            "whole one.",
        )
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{META} cannot be read: {error}.", where=str(path), hint="Choose another checkpoint."
        ) from error
    return FoundCheckpoint(path=path, step=step, meta=meta)


def newest_checkpoint(folder: Path, *, run_id: str | None = None) -> FoundCheckpoint | None:
    """The whole checkpoint with the highest step, with the reasons for those passed over.

    Args:
        run_id: only checkpoints of this run; None accepts any.

    Raises:
        CheckpointError: the folder is there but cannot be listed.
    """
    skipped: list[str] = []
    for path in reversed(_checkpoint_paths(folder)):
        try:
            found = read_checkpoint(path)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        if run_id is not None and found.meta.get("run_id") != run_id:
            skipped.append(f"{path}: it belongs to run '{found.meta.get('run_id')}'")
            continue
        return FoundCheckpoint(path, found.step, found.meta, tuple(skipped))
    return None


def passed_over(folder: Path) -> tuple[str, ...]:
    """Why each checkpoint in a folder without a usable one cannot be used."""
    reasons = ((path, damage(path)) for path in reversed(_checkpoint_paths(folder)))
    return tuple(f"{path}: {reason}." for path, reason in reasons if reason)


def find_checkpoint(path: Path) -> FoundCheckpoint:
    """The checkpoint at `path`, or the newest whole one of the run directory at `path`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if step_of(path) is not None:
        return read_checkpoint(path)
    for folder in (path / "checkpoints", path):
        if (found := newest_checkpoint(folder)) is not None:
            return found
    damaged = "; ".join(passed_over(path / "checkpoints") + passed_over(path))
    raise CheckpointError(
        f"There is no whole checkpoint{f' ({damaged})' if damaged else ''}.",
        where=str(path),
        hint="Name a run directory or a folder like checkpoints/step-000200.",
    )


def _checkpoint_paths(folder: Path) -> list[Path]:
    """Every folder with a checkpoint's name, by rising step (10000 after 9000)."""
    try:
        paths = [path for path in folder.iterdir() if step_of(path) is not None]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"The checkpoints cannot be listed: {error.strerror}.",
            where=str(folder),
            hint="Check its rights; nothing was changed.",
        ) from error
    return sorted(paths, key=lambda path: step_of(path) or 0)


def _own_checkpoints(folder: Path, run_id: str) -> list[FoundCheckpoint]:
    """A run's whole checkpoints by rising step; a damaged one is nobody's."""
    own = []
    for path in _checkpoint_paths(folder):
        try:
            found = read_checkpoint(path)
        except CheckpointError:
            continue
        if found.meta.get("run_id") == run_id:
            own.append(found)
    return own


def rotate(folder: Path, *, limit: int | None, run_id: str, best_step: int | None) -> list[Path]:
    """Remove this run's oldest whole checkpoints down to `limit`, after a new one is complete.

    Never removes the newest whole one, the best one, a damaged one (somebody may want to look
    at it) or one of another run.

    Returns:
        What was removed.
    """
    if limit is None:
        return []
    own = _own_checkpoints(folder, run_id)
    removed = [found.path for found in own[: -max(1, limit)] if found.step != best_step]
    for path in removed:
        # Renamed first: a kill in the middle must not leave half a checkpoint under its name.
        outdated = path.with_name(f"{_OUTDATED_PREFIX}{path.name}")
        path.rename(outdated)
        shutil.rmtree(outdated)
    return removed


def leave_behind(folder: Path, step: int, *, run_id: str) -> tuple[Path, ...]:
    """Rename a run's whole checkpoints of later steps: it goes on from `step` on another branch.

    Returns:
        What they are called now, such as step-000012.left or step-000012.left-2.
    """
    renamed = []
    for found in _own_checkpoints(folder, run_id):
        if found.step <= step:
            continue
        number, name = 1, f"{found.path.name}.left"
        while (aside := found.path.with_name(name)).exists():
            number += 1
            name = f"{found.path.name}.left-{number}"
        found.path.rename(aside)
        renamed.append(aside)
    return tuple(renamed)


def clear_leftovers(folder: Path) -> list[Path]:
    """Remove what an interrupted save or rotation left under a hidden name.

    A checkpoint that was moved aside for a newer one of the same step, which then never came,
    gets its name back.

    Returns:
        What was removed.
    """
    removed = []
    for path in folder.glob(f"{_OUTDATED_PREFIX}*"):
        original = path.with_name(path.name.removeprefix(_OUTDATED_PREFIX))
        if not original.exists() and damage(path) is None:
            path.rename(original)
            continue
        shutil.rmtree(path)
        removed.append(path)
    for path in folder.glob(f"{_UNFINISHED_PREFIX}*"):
        shutil.rmtree(path)
        removed.append(path)
    return removed


def check_space(folder: Path, needed_bytes: int) -> None:
    """Refuse a save that cannot fit, before a byte of it is written.

    Raises:
        CheckpointError: less than `needed_bytes` are free.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise CheckpointError(
            f"Free space cannot be read: {error.strerror}.",
            where=str(folder),
            hint="Check that output_dir is still there.",
        ) from error
    if free < needed_bytes:
        raise CheckpointError(
            f"A checkpoint needs {_mib(needed_bytes)}, but only {_mib(free)} are free.",
            where=str(folder),
            hint="Free space there, lower save_total_limit or set another output_dir; what is "
            "already saved is untouched.",
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
