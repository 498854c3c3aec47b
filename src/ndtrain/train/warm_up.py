"""What a rank gets ready while it waits for the others: the compiler."""

from concurrent.futures import ThreadPoolExecutor

import torch

from ndtrain.recipe.schema import Recipe


def may_compile(recipe: Recipe) -> bool:
    """Whether blocks will be compiled, as far as can be said before there is a device."""
    if recipe.torch_compile == "auto":
        return recipe.device != "cpu" and torch.cuda.device_count() > 0
    return recipe.torch_compile


class WarmUp:
    """Imports the compiler in a thread, while the process group is made.

    Joining the group waits for other ranks, for the driver and for NCCL; the import, seconds of
    work, also starts the compiler's own processes. It is over before a model is built, so that no
    part of training runs beside it.

    Args:
        wanted: False does nothing.
    """

    def __init__(self, wanted: bool) -> None:
        self._threads = ThreadPoolExecutor(1, "warm-up")
        self._done = self._threads.submit(_import_compiler) if wanted else None

    def finish(self) -> None:
        """Wait for the import; raises what it raised."""
        self._threads.shutdown()
        if self._done is not None:
            self._done.result()


def _import_compiler() -> None:
    import torch._inductor.compile_fx  # noqa: F401
