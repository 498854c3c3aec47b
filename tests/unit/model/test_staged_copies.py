"""Copies through locked buffers: every element arrives, whatever the sizes and dtypes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ndtrain.model.staged_copies import StagedCopies


@given(
    elements=st.integers(0, 200),
    buffer_bytes=st.integers(8, 300),
    dtypes=st.tuples(*[st.sampled_from([torch.bfloat16, torch.float32, torch.float64])] * 2),
)
def test_parts_of_any_size_arrive_in_the_destinations_dtype(elements, buffer_bytes, dtypes):
    source = torch.arange(elements, dtype=dtypes[0])
    destination = torch.full((elements,), -1, dtype=dtypes[1])
    copies = StagedCopies(torch.device("cpu"), buffer_bytes)
    copies.copy_flat(destination, source)
    copies.copy_flat(destination, source)
    assert torch.equal(destination, source.to(dtypes[1]))


@pytest.mark.parametrize("transposed", [True, False])
def test_a_copy_takes_the_shape_and_layout_of_its_destination(transposed):
    source = torch.arange(12.0).view(3, 4)
    destination = torch.zeros(4, 3).T if transposed else torch.zeros(3, 4)
    StagedCopies(torch.device("cpu")).copy(destination, source)
    assert torch.equal(destination, source)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_device_gets_what_lay_on_the_host(dtype):
    source = torch.randn(3000, 1001).to(torch.bfloat16)
    destination = torch.empty(3000, 1001, dtype=dtype, device="cuda")
    copies = StagedCopies(destination.device, 2**20)
    for _ in range(3):
        copies.copy(destination, source)
    assert torch.equal(destination.cpu(), source.to(dtype))
