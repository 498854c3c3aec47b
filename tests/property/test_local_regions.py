"""Regions against torch's own splitting, and the laws that any split must obey."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from ndtrain.model.regions import local_region, take_region, whole_region

sizes = st.integers(0, 13)
parts = st.integers(1, 5)


def places(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size in mesh)))


def indices(length: int, mesh: tuple[int, ...], split: tuple[Placement, ...]) -> list[list[int]]:
    """What each place holds of a vector that counts its own places."""
    held = []
    for place in places(mesh):
        part = take_region(torch.arange(length), local_region((length,), split, mesh, place))
        held.append([] if part is None else part.tolist())
    return held


@given(length=sizes, ranks=parts)
def test_one_axis_is_torch_chunk(length: int, ranks: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(length).chunk(ranks)]
    chunks = [chunk for chunk in chunks if chunk]
    expected = chunks + [[]] * (ranks - len(chunks))
    assert indices(length, (ranks,), (Shard(0),)) == expected


@given(length=sizes, ranks=parts, pieces=st.integers(2, 4))
def test_interleaved_pieces_are_split_as_torch_splits_them(
    length: int, ranks: int, pieces: int
) -> None:
    placement = _StridedShard(0, split_factor=pieces)
    shards, _ = placement._split_tensor(torch.arange(length), ranks, with_padding=False)
    assert indices(length, (ranks,), (placement,)) == [shard.tolist() for shard in shards]


@given(length=sizes, outer=parts, inner=st.integers(2, 4))
def test_sharded_data_parallelism_chunks_what_tensor_parallelism_left(
    length: int, outer: int, inner: int
) -> None:
    split = (_StridedShard(0, split_factor=inner), Shard(0))
    expected = []
    for one, other in places((outer, inner)):
        (whole_inner,) = [_chunk(list(range(length)), inner, other)]
        expected.append(_chunk(whole_inner, outer, one))
    assert indices(length, (outer, inner), split) == expected


def _chunk(values: list[int], ranks: int, rank: int) -> list[int]:
    step = -(-len(values) // ranks)
    return values[rank * step : (rank + 1) * step] if step else []


@given(
    shape=st.lists(sizes, min_size=1, max_size=3),
    mesh=st.tuples(parts, parts, st.integers(2, 3)),
    data=st.data(),
)
def test_every_element_is_held_once_by_each_copy(
    shape: list[int], mesh: tuple[int, ...], data: st.DataObject
) -> None:
    dim = st.integers(0, len(shape) - 1)
    inner = data.draw(dim.map(Shard))
    outer = data.draw(dim)
    middle = _StridedShard(0, split_factor=mesh[2]) if outer == inner.dim == 0 else Shard(outer)
    if outer == inner.dim != 0:
        middle = _StridedShard(outer, split_factor=mesh[2])
    split = (Replicate(), middle, inner)
    whole = torch.arange(max(1, _count(shape)))[: _count(shape)].reshape(shape)
    held: list[int] = []
    for place in places(mesh):
        region = local_region(shape, split, mesh, place)
        part = take_region(whole, region)
        assert region.is_empty == (part is None)
        if part is not None:
            assert tuple(part.shape) == region.shape
            held += part.flatten().tolist()
    assert sorted(held) == sorted(list(range(_count(shape))) * mesh[0])


def _count(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@given(shape=st.lists(sizes, max_size=3), mesh=st.tuples(parts, parts))
def test_copies_hold_everything(shape: list[int], mesh: tuple[int, ...]) -> None:
    for place in places(mesh):
        region = local_region(shape, (Replicate(), Replicate()), mesh, place)
        assert region == whole_region(shape)
        assert region.is_whole(shape)
