"""Saving and loading a run: sharded, complete or absent, on any mesh.

A save blocks training only until the next optimizer step needs the tensors again; copying to
host memory, writing, fsync and sealing happen in the background. Every rank takes part in every
call; the main rank decides what all of them use.
"""

import platform
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

import ndtrain
from ndtrain.errors import CheckpointError
from ndtrain.parallel.runtime import Runtime
from ndtrain.train import checkpoint_files as files
from ndtrain.train import checkpoint_state as state
from ndtrain.train import checkpoint_store as store
from ndtrain.train.checkpoint_files import FoundCheckpoint, find_checkpoint
from ndtrain.train.checkpoint_load import agree, load_tensors
from ndtrain.train.staging import HostCopies
from ndtrain.train.state import Progress

__all__ = ["Checkpointer", "SavedCheckpoint", "find_checkpoint"]

T = TypeVar("T")

_SPARE = 1.02
_SPARE_BYTES = 2**20
"""Headroom over the bare tensors for indexes and file system blocks."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A save that is complete on disk.

    Attributes:
        seconds: from the call to the renamed folder.
        blocked_seconds: how long training stood still for it.
    """

    step: int
    path: Path
    seconds: float
    blocked_seconds: float


@dataclass
class _Save:
    """A save in flight."""

    step: int
    started: float
    staged: Future[dict[str, torch.Tensor]]
    done: Future[float]
    blocked: float = 0.0


class Checkpointer:
    """Saves and loads the states of one run; every method is called by all ranks together.

    Args:
        run_dir: the run's directory; checkpoints go to its `checkpoints/`.
        run_id: the run that owns them; rotation touches no other run's.
        limit: how many to keep, None for all.
        asynchronous: write beside the training.
        trained_only: leave frozen parameters out (an adapter on a base that is on disk).
        about: facts for meta.json: mesh, resolved recipe, ...
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        runtime: Runtime,
        run_id: str,
        limit: int | None = None,
        asynchronous: bool = True,
        trained_only: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = run_dir / "checkpoints"
        self._runtime = runtime
        self._run_id = run_id
        self._limit = limit
        self._asynchronous = asynchronous
        self._trained_only = trained_only
        self._about = dict(about or {})
        # Groups of their own: the background thread's collectives must not mix with the step's.
        self._background_group = dist.new_group(backend="gloo", timeout=runtime.timeout)
        self._group = dist.new_group(backend="gloo", timeout=runtime.timeout)
        self._copies = HostCopies(runtime.device) if asynchronous else None
        self._in_flight: _Save | None = None
        self._finished: list[SavedCheckpoint] = []
        self._agree(self._prepare_folder, self._group)

    def newest(self) -> FoundCheckpoint | None:
        """This run's newest whole checkpoint, the same on every rank."""
        return self._agree(
            lambda: files.newest_checkpoint(self.folder, run_id=self._run_id), self._group
        )

    def passed_over(self) -> tuple[str, ...]:
        """Why each checkpoint of a folder without a usable one is of no use."""
        return self._agree(lambda: files.passed_over(self.folder), self._group)

    def find(self, path: Path) -> FoundCheckpoint:
        """The checkpoint a user named: one folder, or a run directory's newest.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        return self._agree(lambda: find_checkpoint(path), self._group)

    def of_step(self, step: int) -> FoundCheckpoint | None:
        """This folder's checkpoint of a step; None where there is no whole one."""

        def look() -> FoundCheckpoint | None:
            try:
                return files.read_checkpoint(files.final_path(self.folder, step))
            except CheckpointError:
                return None

        return self._agree(look, self._group)

    def holds(self, found: FoundCheckpoint) -> bool:
        """Whether a checkpoint stands in this run's folder."""
        return self._agree(
            lambda: found.path.resolve().parent == self.folder.resolve(), self._group
        )

    def leave_behind(self, step: int) -> tuple[Path, ...]:
        """Rename this run's checkpoints of later steps than `step`; says what they are now."""
        return self._agree(
            lambda: files.leave_behind(self.folder, step, run_id=self._run_id), self._group
        )

    def check_space(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Refuse before the first step a run whose first checkpoint cannot fit.

        Raises:
            CheckpointError: the free space is too small.
        """
        tensors = state.model_tensors(model, trained_only=self._trained_only)
        expected = state.total_bytes(tensors)
        if optimizer is not None:
            held = state.total_bytes(state.optimizer_tensors(model, optimizer))
            # Before its first step AdamW holds nothing yet; it will keep two moments.
            expected += held or 2 * sum(
                parameter.numel() * parameter.element_size()
                for parameter in model.parameters()
                if parameter.requires_grad
            )
        self._require_space(expected)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        progress: Progress,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Start a save (asynchronous) or do it; a save in flight is waited for first.

        Raises:
            CheckpointError: this save, or the one in flight before it, failed.
        """
        started = time.perf_counter()
        self.wait()
        tensors = state.model_tensors(model, trained_only=self._trained_only)
        if optimizer is not None:
            tensors |= state.optimizer_tensors(model, optimizer)
        tensors |= state.generator_tensors(self._runtime.rank, self._runtime.device)
        self._require_space(state.total_bytes(tensors))
        meta = self._meta(step, progress, extra)
        blocks = state.as_blocks(tensors)
        if self._copies is None:
            self._write(blocks, step, meta)
            self._finish(step, started, time.perf_counter() - started)
            return
        if self._runtime.device.type == "cuda":
            # The copy runs on a stream of its own, which knows nothing of the step's kernels.
            torch.cuda.current_stream().synchronize()
        staged = self._copies.copy(blocks)
        done = _in_background(lambda: self._write_staged(staged, step, meta))
        save = _Save(step, started, staged, done)
        if optimizer is not None:
            self._hold_next_step(optimizer, save)
        save.blocked = time.perf_counter() - started
        self._in_flight = save

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight that `poll` has not yet told of."""
        return self._in_flight is not None

    def poll(self) -> list[SavedCheckpoint]:
        """Saves completed since the last call; does not wait.

        Raises:
            CheckpointError: the save in flight failed.
        """
        save = self._in_flight
        if save is not None and save.done.done():
            self._collect(save)
        finished, self._finished = self._finished, []
        return finished

    def wait(self) -> None:
        """Wait for the save in flight; `poll` then tells of it.

        Raises:
            CheckpointError: it failed.
        """
        if (save := self._in_flight) is not None:
            started = time.perf_counter()
            save.done.exception()
            save.blocked += time.perf_counter() - started
            self._collect(save)

    def load(
        self,
        found: FoundCheckpoint,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Progress:
        """Fill model and optimizer in place, whatever mesh they were saved from.

        Raises:
            CheckpointError: the checkpoint holds other tensors, or cannot be read.
        """
        load_tensors(found, model, optimizer, self._runtime, self._group)
        return Progress(**found.meta["progress"])

    def close(self) -> None:
        """Finish what is in flight and release host memory.

        Raises:
            CheckpointError: the save in flight failed.
        """
        try:
            self.wait()
        finally:
            if self._copies is not None:
                self._copies.close()

    def _prepare_folder(self) -> None:
        probe = self.folder / ".writable"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"\n")
            probe.unlink()
            files.clear_leftovers(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints cannot be written: {error.strerror}.",
                where=str(self.folder),
                hint="Set output_dir to a folder with space that you may write to.",
            ) from error

    def _require_space(self, tensor_bytes: int) -> None:
        needed = int(tensor_bytes * _SPARE) + _SPARE_BYTES
        self._agree(lambda: files.check_space(self.folder, needed), self._group)

    def _meta(
        self, step: int, progress: Progress, extra: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "format": files.FORMAT_VERSION,
            "step": step,
            "run_id": self._run_id,
            "progress": asdict(progress),
            "trained_only": self._trained_only,
            "world_size": self._runtime.world_size,
            "saved_at": time.time(),
            "versions": {
                "ndtrain": ndtrain.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            **self._about,
            "extra": dict(extra or {}),
        }

    def _hold_next_step(self, optimizer: torch.optim.Optimizer, save: _Save) -> None:
        """Let the optimizer's next step wait until the copy it would overwrite is made."""

        def wait_for_copy(*_: Any) -> None:
            handle.remove()
            started = time.perf_counter()
            # A failed copy is reported by poll, for all ranks together.
            save.staged.exception()
            save.blocked += time.perf_counter() - started

        handle = optimizer.register_step_pre_hook(wait_for_copy)

    def _write_staged(
        self, staged: Future[dict[str, torch.Tensor]], step: int, meta: Mapping[str, Any]
    ) -> float:
        failure = staged.exception()
        reasons: list[str | None] = [None] * self._runtime.world_size
        dist.all_gather_object(
            reasons, None if failure is None else _reason(failure), self._background_group
        )
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise CheckpointError(
                    f"Rank {rank} could not copy its tensors to host memory: {reason}.",
                    where=str(files.final_path(self.folder, step)),
                    hint="Free host memory, or set save_async: false.",
                ) from failure
        self._write(staged.result(), step, meta)
        return time.perf_counter()

    def _write(
        self,
        tensors: Mapping[str, torch.Tensor],
        step: int,
        meta: Mapping[str, Any],
    ) -> None:
        unfinished = files.unfinished_path(self.folder, step)
        group = self._background_group

        def make_folder() -> None:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)

        def finish() -> None:
            files.seal(unfinished, meta, replaces=files.final_path(self.folder, step))
            files.rotate(
                self.folder,
                limit=self._limit,
                run_id=self._run_id,
                best_step=meta["progress"]["best_step"],
            )

        try:
            self._agree(make_folder, group)
            store.write_tensors(tensors, unfinished, group)
            self._agree(finish, group)
        except CheckpointError:
            if self._runtime.is_main:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _collect(self, save: _Save) -> None:
        self._in_flight = None
        self._finish(save.step, save.started, save.blocked, ended=save.done.result())

    def _finish(
        self, step: int, started: float, blocked: float, ended: float | None = None
    ) -> None:
        seconds = (ended or time.perf_counter()) - started
        path = files.final_path(self.folder, step)
        self._finished.append(SavedCheckpoint(step, path, seconds, blocked))

    def _agree(self, action: Callable[[], T], group: dist.ProcessGroup) -> T:
        """What `action` gives on the main rank, everywhere; its error too."""
        return agree(action, group, is_main=self._runtime.is_main)


def _in_background(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread that does not keep the process alive when the run has failed."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _reason(failure: BaseException) -> str:
    """What went wrong, with its kind: some errors say nothing without it."""
    return f"{type(failure).__name__}: {failure}".rstrip(": ")
