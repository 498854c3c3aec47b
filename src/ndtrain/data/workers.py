"""Encoding on all cores: raw rows to forked processes, token rows back in the same order.

Processes are forked before any process group or device exists, so each has the tokenizer at
once and nothing is sent but rows. Small inputs are encoded in this process.
"""

import multiprocessing
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from traceback import format_exc
from typing import Any

from ndtrain.data.encode import Chunk, RowEncoder
from ndtrain.data.prefetch import prefetch
from ndtrain.data.rows import RawRow
from ndtrain.errors import NdtrainError, OutOfMemoryError

CHUNK_ROWS = 512
CHUNK_BYTES = 1 << 20
IN_PROCESS_ROWS = 4096
IN_PROCESS_BYTES = 16 << 20


@dataclass(frozen=True)
class _Fault:
    """An error that nobody foresaw, as text: not every exception survives the way to here."""

    traceback: str


def encode_all(rows: Iterable[RawRow], encoder: RowEncoder, processes: int) -> Generator[Chunk]:
    """Token rows of all raw rows, in their order.

    Raises:
        NdtrainError: a row failed, here or in a worker.
        RuntimeError: a worker met an error that nobody foresaw; it has the worker's traceback.
    """
    reader = iter(rows)
    first, is_all = _first_rows(reader)
    chunks = _chunks(chain(first, reader))
    if processes < 2 or is_all:
        for chunk in chunks:
            yield encoder.encode(chunk)
        return
    yield from _encode_in_processes(chunks, encoder, processes)


def _first_rows(rows: Iterator[RawRow]) -> tuple[list[RawRow], bool]:
    """Rows up to what is not worth a process, and whether these are all."""
    first: list[RawRow] = []
    weight = 0
    for row in rows:
        first.append(row)
        weight += row.weight
        if len(first) == IN_PROCESS_ROWS or weight > IN_PROCESS_BYTES:
            return first, False
    return first, True


def num_processes(asked: int | None) -> int:
    """Processes to use: as asked, else one for each core this process may run on."""
    return asked or len(os.sched_getaffinity(0))


def _chunks(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    """Rows in lists that are neither long nor heavy."""
    chunk: list[RawRow] = []
    weight = 0
    for row in rows:
        chunk.append(row)
        weight += row.weight
        if len(chunk) == CHUNK_ROWS or weight > CHUNK_BYTES:
            yield chunk
            chunk, weight = [], 0
    if chunk:
        yield chunk


def _encode_in_processes(
    chunks: Iterator[list[RawRow]], encoder: RowEncoder, processes: int
) -> Iterator[Chunk]:
    """Deal chunks round; few are under way at a time, so memory stays bounded."""
    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    workers: list[Any] = []
    sent: Generator[Connection] = (end for end in ends)
    try:
        for _ in range(processes):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(encoder, theirs, [*ends, ours]))
            worker.daemon = True
            worker.start()
            theirs.close()
            ends.append(ours)
            workers.append(worker)
        # A thread of its own sends: a worker may be waiting to hand over a result, and only reads
        # again when that was received here.
        sent = prefetch(_send(chunks, ends), processes)
        for end in sent:
            yield _receive(end)
    finally:
        for worker in workers:
            worker.terminate()
        sent.close()
        for end in ends:
            end.close()
        for worker in workers:
            worker.join()


def _send(chunks: Iterator[list[RawRow]], ends: Sequence[Connection]) -> Generator[Connection]:
    """Deal the chunks round; gives the workers' ends in the order of the chunks."""
    for number, chunk in enumerate(chunks):
        end = ends[number % len(ends)]
        with suppress(OSError):  # a dead worker is reported by whoever waits for its result
            end.send(chunk)
        yield end


def _receive(end: Connection) -> Chunk:
    """The next result of a worker."""
    try:
        result = end.recv()
    except (EOFError, OSError):
        raise _out_of_memory() from None
    if isinstance(result, NdtrainError):
        raise result
    if isinstance(result, _Fault):
        raise RuntimeError(f"a tokenising process failed:\n{result.traceback}")
    assert isinstance(result, Chunk)
    return result


def _work(encoder: RowEncoder, end: Connection, others: list[Connection]) -> None:
    """The life of a worker: encode what comes until the pipe closes."""
    for other in others:
        other.close()
    while True:
        try:
            chunk = end.recv()
        except EOFError:
            return
        end.send(_encode(encoder, chunk))


def _encode(encoder: RowEncoder, chunk: list[RawRow]) -> Chunk | NdtrainError | _Fault:
    """The result of a chunk, or what stopped it."""
    try:
        return encoder.encode(chunk)
    except NdtrainError as error:
        return error
    except MemoryError:
        return _out_of_memory()
    except Exception:
        return _Fault(format_exc())


def _out_of_memory() -> OutOfMemoryError:
    """The message for a worker that had no room."""
    return OutOfMemoryError(
        "a tokenising process was killed, most likely for want of memory.",
        hint="Set dataset_num_proc to a smaller number.",
    )
