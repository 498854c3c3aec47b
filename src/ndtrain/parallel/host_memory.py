"""Memory of the host: a run on a CPU keeps what it frees, for the tensors of its next step."""

import ctypes

from ndtrain import environment

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""`mallopt`'s names for its parameters, of malloc.h."""
_MOST = 2**31 - 1
_NEVER = -1


def keep_freed_memory() -> bool:
    """Let malloc hand freed memory out again instead of returning it to the system.

    A freed tensor of some MB otherwise goes back at once, and the system clears each page of the
    next one as it is first touched: a tenth of a step on two cores. Settings of the user's own
    stay, and a C library without `mallopt` is left alone.

    Returns:
        Whether malloc took it.
    """
    if environment.sets_malloc():
        return False
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is None:
        return False
    return bool(change(_MMAP_THRESHOLD, _MOST) and change(_TRIM_THRESHOLD, _NEVER))
