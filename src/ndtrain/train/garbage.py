"""Python's garbage collector, kept from stopping a rank in the middle of a step."""

import gc


def leave_out_what_lives() -> None:
    """Collect once, then leave what is left out of every later collection.

    Compiling the first step makes hundreds of thousands of objects that live as long as the run.
    A whole collection looks through all of them, a tenth of a second in which this rank launches
    nothing and the others wait for it; afterwards it takes less than a millisecond.
    """
    gc.collect()
    gc.freeze()
