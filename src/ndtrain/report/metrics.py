"""`metrics.jsonl`: one event a line, every float in full, each step once over all restarts."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from io import SEEK_END, FileIO
from pathlib import Path
from typing import Any

from ndtrain.errors import CheckpointError
from ndtrain.report.atomic import replace_text, write_failure
from ndtrain.report.events import EvalDone, Event, ProfileDone, RunStarted
from ndtrain.report.history import History, gather

FORMAT_VERSION = 1


def event_record(event: Event) -> dict[str, Any]:
    """The event as a line of the file holds it."""
    return {"v": FORMAT_VERSION, "event": event.event, **asdict(event)}


def encode_record(record: Mapping[str, Any], *, indent: int | None = None) -> str:
    """Strict JSON, on one line unless `indent` is given.

    JSON has no NaN and no infinity: such a value becomes null, and `nonfinite` says what it was,
    so that any reader can parse the line and ours gets the value back.
    """
    finite, nonfinite = _split_nonfinite(record)
    if nonfinite:
        finite["nonfinite"] = nonfinite
    return json.dumps(finite, ensure_ascii=False, allow_nan=False, indent=indent)


def decode_record(line: str) -> dict[str, Any]:
    """The record of a line; non-finite values are back in their place."""
    record: dict[str, Any] = json.loads(line)
    _restore_nonfinite(record, record.pop("nonfinite", {}))
    return record


def _split_nonfinite(record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record with null for each non-finite float, and those floats as words."""
    finite = dict(record)
    nonfinite: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, float) and not math.isfinite(value):
            finite[key], nonfinite[key] = None, str(value)
        elif isinstance(value, Mapping):
            finite[key], inside = _split_nonfinite(value)
            if inside:
                nonfinite[key] = inside
    return finite, nonfinite


def _restore_nonfinite(record: dict[str, Any], nonfinite: Mapping[str, Any]) -> None:
    for key, word in nonfinite.items():
        if isinstance(word, Mapping):
            _restore_nonfinite(record[key], word)
        else:
            record[key] = float(word)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a run; a last line that a crash cut short is left out.

    Raises:
        CheckpointError: the file does not exist, or a line before the last is broken.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {error.strerror}.", where=str(path), hint="Is it a run directory?"
        ) from error
    # Only at newlines: text inside a record may hold the other characters that end lines.
    *lines, unfinished = text.split("\n")
    if unfinished:
        lines.append(unfinished)
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(decode_record(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise CheckpointError(
                "is not a JSON object.",
                where=f"{path}:{number}",
                hint="Remove the line, or move the file away to begin a new one.",
            ) from error
    return records


def records_until(records: Sequence[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """The history up to and including `step`: what a run that resumes there still vouches for.

    A record without a step of its own, such as a notice, belongs to the step before it. A profile
    stays: its steps are done again, but not measured again.
    """
    if step == 0:
        return []
    kept = []
    reached = 0
    for record in records:
        if record["event"] == ProfileDone.event:
            kept.append(record)
            continue
        reached = record.get("step", record.get("start_step", reached))
        if reached <= step:
            kept.append(record)
    return kept


class MetricsWriter:
    """Appends each event at once, so that a killed run keeps everything it did.

    Args:
        path: the file.
        history: follows the file: what stands in the one stands in the other.
    """

    def __init__(self, path: Path, history: History | None = None) -> None:
        self._path = path
        self._history = history if history is not None else History()
        self._file: FileIO | None = None
        self._early: list[Event] = []
        self._evaluated: set[int] = set()

    def write(self, event: Event) -> None:
        """Append the event; a start first drops what the resumed run will do again.

        Raises:
            CheckpointError: the disk is full or the file cannot be written.
        """
        if isinstance(event, RunStarted):
            self._file = self._continue_at(event.start_step)
        if self._file is None:
            # Where the run continues is not known yet, nor what must be dropped.
            self._early.append(event)
            return
        for waiting in (*self._early, event):
            self._append(self._file, waiting)
        self._early.clear()

    def close(self) -> None:
        """Close the file; events of a run that never started are written now."""
        if self._file is None and self._early:
            self._file = self._continue_at(None)
            for event in self._early:
                self._append(self._file, event)
            self._early.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _continue_at(self, step: int | None) -> FileIO:
        """Rewrite the file without what comes after `step` (None: keep all) and open it."""
        records = read_metrics(self._path) if self._path.exists() else []
        if step is not None:
            records = records_until(records, step)
        self._history.replace(records)
        self._evaluated = {record["step"] for record in records if record["event"] == "eval"}
        replace_text(self._path, "".join(encode_record(record) + "\n" for record in records))
        try:
            return FileIO(self._path, "ab")
        except OSError as error:
            raise write_failure(self._path, error) from error

    def _append(self, file: FileIO, event: Event) -> None:
        if isinstance(event, EvalDone):
            if event.step in self._evaluated:
                return  # done at the same step before the restart
            self._evaluated.add(event.step)
        record = event_record(event)
        line = (encode_record(record) + "\n").encode()
        end = file.seek(0, SEEK_END)
        try:
            while line:
                line = line[file.write(line) :]
        except OSError as error:
            file.truncate(end)  # a full disk must not leave half a line
            raise write_failure(self._path, error) from error
        self._history.add(record)


def read_history(path: Path) -> History:
    """The history in a metrics file; an empty one where there is no file yet."""
    return gather(read_metrics(path)) if path.exists() else History()
