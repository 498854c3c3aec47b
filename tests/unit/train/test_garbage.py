"""Collections of a running step: cheap, and still collections."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from ndtrain.train.garbage import leave_out_what_lives


class Node:
    """Part of a cycle, which only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collected_as_before() -> Iterator[None]:
    yield
    gc.unfreeze()


def dropped() -> weakref.ref[Node]:
    return weakref.ref(Node())


def test_what_lives_is_not_looked_at_again() -> None:
    living = [[number] for number in range(100_000)]
    assert len(gc.get_objects()) > len(living)
    leave_out_what_lives()
    assert len(gc.get_objects()) < 1_000
    assert gc.get_freeze_count() > len(living)


def test_garbage_is_freed_before_and_afterwards() -> None:
    gc.disable()
    try:
        before = dropped()
        assert before() is not None
        leave_out_what_lives()
        assert before() is None
        after = dropped()
        assert after() is not None
        gc.collect()
        assert after() is None
    finally:
        gc.enable()
