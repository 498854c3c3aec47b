"""An iterator that works ahead in a thread of its own."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, Full, Queue
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_POLL_SECONDS = 0.2


def prefetch(items: Iterator[Item], ahead: int) -> Generator[Item]:
    """The same items, up to `ahead` of them made before they are asked for.

    An error of the iterator is raised where its item would have come. The thread ends when the
    items do or when the consumer stops.
    """
    if ahead < 1:
        yield from items
        return
    ready: Queue[tuple[str, Item | BaseException | None]] = Queue(maxsize=ahead)
    stopped = threading.Event()

    def put(kind: str, value: Item | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                ready.put((kind, value), timeout=_POLL_SECONDS)
            except Full:
                continue
            return

    def work() -> None:
        try:
            for item in items:
                put("item", item)
                if stopped.is_set():
                    return
            put("end", None)
        except BaseException as error:
            put("error", error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            try:
                kind, value = ready.get(timeout=_POLL_SECONDS)
            except Empty:
                continue
            if kind == "end":
                return
            if kind == "error":
                assert isinstance(value, BaseException)
                raise value
            yield value  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()


def map_ahead(
    function: Callable[[Item], Result], items: Iterator[Item], *, workers: int, ahead: int
) -> Generator[Result]:
    """The function of each item, in order, made by several threads before it is asked for."""
    with ThreadPoolExecutor(workers, thread_name_prefix="assemble") as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > max(ahead, workers):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
