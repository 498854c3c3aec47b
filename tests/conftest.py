"""What tests of compiled blocks have in common."""

import shutil
from collections.abc import Iterator

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="compiling for the CPU needs g++"
)


@pytest.fixture(
    params=[
        # the same graphs, cut into passes by the same budget, and no code generated for them
        "aot_eager_decomp_partition",
        pytest.param("inductor", marks=[pytest.mark.slow, needs_compiler]),
    ]
)
def compiler_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `torch.compile` compiles with.

    Forced by `set_stance` instead, it would no longer refuse a block of several graphs.
    """
    import torch

    torch.compiler.set_default_backend(request.param)
    yield request.param
    torch.compiler.set_default_backend(None)
