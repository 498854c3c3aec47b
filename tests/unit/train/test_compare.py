"""What counts as the same, and what does not."""

import math
from dataclasses import replace

import pytest
import torch

from ndtrain.train.cells import Trace
from ndtrain.train.compare import compare_traces

TRACE = Trace((5.0, 4.0), (2.0, 1.5), {"a": torch.zeros(3), "b": torch.ones(2, 2)})


def test_a_trace_is_the_same_as_itself() -> None:
    comparison = compare_traces(TRACE, TRACE)
    assert comparison.differences == ()
    assert comparison.table().endswith("verdict: the same")


def test_rounding_is_no_difference() -> None:
    other = replace(TRACE, losses=(5.00004, 4.0), grad_norms=(2.0, 1.50014))
    assert compare_traces(other, TRACE).differences == ()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"losses": (5.0, 4.0001)}, "loss of step 2 by 2.5e-05"),
        ({"losses": (math.nan, 4.0)}, "loss of step 1 by nan"),
        ({"grad_norms": (2.001, 1.5)}, "gradient norm of step 1 by 5.0e-04"),
        ({"grad_norms": (2.0, math.inf)}, "gradient norm of step 2 by inf"),
        (
            {"parameters": {"a": torch.tensor([0.0, 0.001, 0.0]), "b": torch.ones(2, 2)}},
            "parameter a by 1.0e-03",
        ),
        (
            {"parameters": {"a": torch.zeros(3), "b": torch.full((2, 2), math.nan)}},
            "parameter b by nan",
        ),
        ({"parameters": {"a": torch.zeros(3)}}, "parameter b by inf"),
    ],
)
def test_everything_else_is_named(changed: dict, said: str) -> None:
    comparison = compare_traces(replace(TRACE, **changed), TRACE)
    assert comparison.differences == (said,)
    assert comparison.table().endswith("verdict: differs")
