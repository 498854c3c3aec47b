"""Importing heavy libraries without looking for garbage on the way."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Import torch and transformers in three quarters of the time.

    They make hundreds of thousands of objects that live as long as the process. Each collection
    on the way, and those at its end, would look through all of them again; what is here afterwards
    is left out of later collections.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
