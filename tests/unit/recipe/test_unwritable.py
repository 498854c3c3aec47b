import errno
import os
from pathlib import Path

import pytest

from ndtrain.recipe.unwritable import advise_unwritable


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "Free space there, or go elsewhere."),
        (errno.EACCES, "Change the rights of '/gone', or go elsewhere."),
        (errno.EROFS, "The disk of '/gone' can only be read: go elsewhere."),
        (errno.ENOENT, "The folder '/gone' is gone: make it again, or go elsewhere."),
        (errno.EFBIG, "Free space or rights there, or go elsewhere."),
    ],
)
def test_advice_fits_the_error(number: int, advice: str) -> None:
    error = OSError(number, os.strerror(number), "/gone/file")
    assert advise_unwritable(Path("/gone/file"), error, "go elsewhere") == advice
