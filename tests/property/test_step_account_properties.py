"""However kernels overlap, each moment of the window is told once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndtrain.train.step_account import BETWEEN, DATA, HOST, RANKS, WORK, Span, account, covered

NAMES = ("nvjet", "flash", "adam", "triton_poi_fused_add_0", "Memset (Device)", "ncclDevKernel")
moments = st.integers(0, 40)
ends = st.tuples(moments, moments).map(lambda pair: (min(pair), max(pair)))
windows = ends.filter(lambda pair: pair[0] < pair[1])


def spans(names: tuple[str, ...]) -> st.SearchStrategy[list[Span]]:
    one = st.builds(lambda name, pair: Span(name, *pair), st.sampled_from(names), ends)
    return st.lists(one, max_size=12)


@given(spans(NAMES), spans(("Optimizer.step",)), spans(("fetch",)), windows)
def test_each_moment_is_told_once(kernels, optimizer, fetches, window):
    found = account(kernels, optimizer=optimizer, fetches=fetches, window=window)
    assert all(share >= 0 for share in found.shares.values())
    assert sum(found.times.values()) == found.window == window[1] - window[0]
    assert sum(found.shares.values()) == pytest.approx(1)


@given(spans(NAMES), spans(("fetch",)), windows)
def test_sums_are_those_of_the_moments(kernels, fetches, window):
    found = account(kernels, optimizer=[], fetches=fetches, window=window)
    exchanges = [span for span in kernels if "nccl" in span.name]
    computing = [span for span in kernels if "nccl" not in span.name]
    busy = covered(computing, window)
    assert sum(found.times[kind] for kind in WORK) == busy
    assert found.times[RANKS] == covered(kernels, window) - busy
    assert found.times[DATA] == covered([*kernels, *fetches], window) - covered(kernels, window)
    idle = found.times[BETWEEN] + found.times[HOST]
    assert idle == found.window - covered([*kernels, *fetches], window)
    assert found.communication == covered(exchanges, window)
    assert found.hidden_communication == found.communication - found.times[RANKS]
