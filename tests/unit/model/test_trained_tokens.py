"""Losses are computed where tokens are trained, and nothing else changes."""

from math import ceil

import torch
from hypothesis import given
from hypothesis import strategies as st

from ndtrain.data.batch import IGNORED
from ndtrain.model.trained_tokens import select_tokens, trained_places

WORDS = st.lists(st.sampled_from([IGNORED, 7]), min_size=1, max_size=60)


@given(targets=WORDS, multiple=st.integers(1, 16))
def test_all_trained_tokens_are_selected_once_in_order(targets: list[int], multiple: int) -> None:
    trained = {place for place, target in enumerate(targets) if target != IGNORED}
    places = trained_places(torch.tensor([targets]), multiple=multiple)
    if places is None:
        # rounded up, they would be all there are
        assert max(1, len(trained)) + multiple > len(targets)
        return
    found = places.tolist()
    assert found == sorted(set(found))
    assert trained <= set(found)
    assert len(found) == max(1, ceil(len(trained) / multiple)) * multiple


def test_rows_that_are_trained_whole_are_not_copied() -> None:
    assert trained_places(torch.full((2, 5), 3)) is None
    hidden = torch.zeros(10, 4)
    assert select_tokens(hidden, None) is hidden


def test_gradients_come_back_to_their_places() -> None:
    hidden = torch.arange(12.0).view(6, 2).requires_grad_()
    places = torch.tensor([1, 2, 5])
    selected = select_tokens(hidden, places)
    assert torch.equal(selected, hidden[places])
    selected.backward(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    expected = torch.zeros(6, 2)
    expected[1], expected[2], expected[5] = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert torch.equal(hidden.grad, expected)
