"""Tokenising processes: order, back-pressure, and one that is killed."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from ndtrain.data.encode import Chunk
from ndtrain.data.rows import RawRow
from ndtrain.data.workers import CHUNK_BYTES, CHUNK_ROWS, IN_PROCESS_ROWS, encode_all, num_processes
from ndtrain.errors import ExitCode, OutOfMemoryError


class Counting:
    """Stands for an encoder: says which rows it got, or dies on one."""

    def __init__(self, deadly: str = "") -> None:
        self.deadly = deadly

    def encode(self, raws: list[RawRow]) -> Chunk:
        places = [raw.where for raw in raws]
        if self.deadly in places:
            os.kill(os.getpid(), signal.SIGKILL)
        process = str(os.getpid()).encode()
        return Chunk(rows_in=len(raws), places=places, digests=[process])


def raw_rows(count: int) -> Iterator[RawRow]:
    return (RawRow(f"row {number}", b"") for number in range(count))


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("count", [0, 1, IN_PROCESS_ROWS, IN_PROCESS_ROWS + 7 * CHUNK_ROWS + 1])
def test_rows_come_back_in_their_order(processes: int, count: int) -> None:
    encoder: Any = Counting()
    chunks = list(encode_all(raw_rows(count), encoder, processes))
    assert [place for chunk in chunks for place in chunk.places] == [
        f"row {number}" for number in range(count)
    ]


def test_reading_stays_close_to_what_is_used() -> None:
    read = 0

    def rows() -> Iterator[RawRow]:
        nonlocal read
        for row in raw_rows(100 * CHUNK_ROWS):
            read += 1
            yield row

    encoder: Any = Counting()
    chunks = encode_all(rows(), encoder, 2)
    for _ in range(10):
        next(chunks)
    assert read <= IN_PROCESS_ROWS + (10 + 8) * CHUNK_ROWS
    chunks.close()


def test_heavy_rows_travel_in_small_lists_and_are_worth_processes() -> None:
    encoder: Any = Counting()
    heavy = (RawRow(f"row {number}", b"x" * CHUNK_BYTES) for number in range(19))
    chunks = list(encode_all(heavy, encoder, 2))
    assert [chunk.rows_in for chunk in chunks] == [2] * 9 + [1]
    assert [place for chunk in chunks for place in chunk.places] == [f"row {n}" for n in range(19)]
    assert {chunk.digests[0] for chunk in chunks}.isdisjoint({str(os.getpid()).encode()})


def test_a_killed_process_is_an_error_that_says_what_to_do() -> None:
    encoder: Any = Counting(deadly="row 6000")
    with pytest.raises(
        OutOfMemoryError, match="Set dataset_num_proc to a smaller number"
    ) as caught:
        list(encode_all(raw_rows(20 * CHUNK_ROWS), encoder, 2))
    assert caught.value.exit_code is ExitCode.MEMORY


class Failing(Counting):
    """Meets an error that nobody foresaw, of a kind that cannot be sent."""

    def encode(self, raws: list[RawRow]) -> Chunk:
        class Unforeseen(Exception):
            pass

        if raws[0].where == "row 6144":
            raise Unforeseen("of this very row")
        return super().encode(raws)


def test_an_unforeseen_error_comes_back_with_its_traceback() -> None:
    encoder: Any = Failing()
    with pytest.raises(RuntimeError, match=r"(?s)process failed.*Unforeseen: of this very row"):
        list(encode_all(raw_rows(20 * CHUNK_ROWS), encoder, 2))


def test_number_of_processes() -> None:
    assert num_processes(3) == 3
    assert num_processes(None) == len(os.sched_getaffinity(0))
