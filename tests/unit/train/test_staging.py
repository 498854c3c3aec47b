"""Copies in host memory: whole, untouched by what follows, in memory that is used again."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ndtrain.parallel import runtime as runtimes
from ndtrain.train.staging import HostCopies

CPU = torch.device("cpu")


def test_a_copy_is_not_touched_by_later_steps_and_its_memory_is_used_again() -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7), "c": torch.zeros(0, 3)}
    copies = HostCopies(CPU)
    first = copies.copy(tensors).result()
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    tensors["a"].add_(1)
    assert first["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (first["b"].item(), first["c"].shape) == (7, (0, 3))
    # one save after another, for as long as a run lasts
    for value in range(3):
        tensors["a"].fill_(value)
        again = copies.copy(tensors).result()
        assert again["a"].tolist() == [[value] * 3] * 2
        assert {name: tensor.data_ptr() for name, tensor in again.items()} == places
    copies.close()


def test_tensors_come_go_and_change_their_size() -> None:
    copies = HostCopies(CPU)
    copies.copy({"a": torch.ones(2), "b": torch.ones(3)}).result()
    found = copies.copy({"a": torch.ones(4, dtype=torch.bfloat16), "c": torch.ones(1)}).result()
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
        "a": ((4,), torch.bfloat16),
        "c": ((1,), torch.float32),
    }
    copies.close()


def test_columns_of_a_larger_tensor_are_copied_as_they_are() -> None:
    whole = torch.arange(12.0).view(3, 4)
    copies = HostCopies(CPU)
    part = copies.copy({"part": whole[:, 1:3]}).result()["part"]
    assert torch.equal(part, whole[:, 1:3])
    assert part.is_contiguous()
    copies.close()


@pytest.fixture
def process_group() -> Iterator[None]:
    runtime = runtimes.start(None, device="cpu", timeout_seconds=30)
    yield
    runtimes.stop(runtime)


@pytest.mark.usefixtures("process_group")
def test_a_shard_keeps_its_place_in_the_whole() -> None:
    mesh = init_device_mesh("cpu", (1,))
    shard = DTensor.from_local(torch.arange(4.0), mesh, [Shard(0)])
    copies = HostCopies(CPU)
    copied = copies.copy({"weight": shard}).result()["weight"]
    assert isinstance(copied, DTensor)
    assert (copied.placements, copied.shape) == (shard.placements, shard.shape)
    shard.to_local().zero_()
    assert copied.to_local().tolist() == [0, 1, 2, 3]
    assert not copied.requires_grad
    copies.close()


def test_a_failed_copy_is_the_futures_error_and_the_next_one_works() -> None:
    copies = HostCopies(CPU)
    with pytest.raises(NotImplementedError):
        copies.copy({"a": torch.empty(2, device="meta")}).result()
    assert copies.copy({"a": torch.ones(2)}).result()["a"].tolist() == [1, 1]
    copies.close()
