"""Which part of a whole tensor a rank holds, worked out from mesh sizes and placements alone.

Tensor parallelism splits first; fully sharded data parallelism then splits what is left along
dim 0, in `torch.chunk` fashion. So placements are undone from the innermost mesh axis outwards:
sizes need not divide, and a rank's part may be empty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, _StridedShard

Interval = tuple[int, int]
"""Start and stop along one dim."""


@dataclass(frozen=True)
class Region:
    """A rank's part of a tensor: per dim the intervals it holds, in the order it holds them."""

    dims: tuple[tuple[Interval, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(sum(stop - start for start, stop in dim) for dim in self.dims)

    @property
    def is_empty(self) -> bool:
        """Whether the rank holds nothing of the tensor."""
        return 0 in self.shape

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Whether the part is the whole tensor of `shape`."""
        return self.dims == whole_region(shape).dims


def whole_region(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return Region(tuple(((0, size),) for size in shape))


def local_region(
    shape: Sequence[int],
    placements: Sequence[Placement],
    sizes: Sequence[int],
    coordinates: Sequence[int],
) -> Region:
    """The part of a tensor at one place of a mesh.

    Args:
        shape: of the whole tensor.
        placements: one a mesh axis, outermost first, as in `DTensor.placements`.
        sizes: of the mesh axes.
        coordinates: this rank's place on each axis.
    """
    dims: list[tuple[Interval, ...]] = [((0, size),) for size in shape]
    for dim in range(len(shape)):
        for axis in _splitting_order(placements, dim, len(shape)):
            split = placements[axis]
            pieces = 1
            if isinstance(split, _StridedShard) and not _follows_inner(placements, axis, sizes):
                pieces = int(split.split_factor)
            dims[dim] = _chunk(dims[dim], pieces, sizes[axis], coordinates[axis])
    return Region(tuple(dims))


def region_of(tensor: torch.Tensor) -> Region:
    """The part of `tensor` that this rank holds; all of a plain tensor."""
    if not isinstance(tensor, DTensor):
        return whole_region(tensor.shape)
    mesh = tensor.device_mesh
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        return Region(tuple(((0, 0),) for _ in tensor.shape))
    return local_region(tensor.shape, tensor.placements, mesh.shape, coordinates)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The values this rank holds, sharing memory with `tensor`."""
    values = tensor.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def read_region(
    region: Region, read: Callable[[tuple[slice, ...]], torch.Tensor]
) -> torch.Tensor | None:
    """Fetch a region with `read`, which is asked for rectangular parts; None when it is empty."""
    if region.is_empty:
        return None
    return _read_dims(region.dims, (), read)


def take_region(tensor: torch.Tensor, region: Region) -> torch.Tensor | None:
    """The part of a whole tensor that `region` names; None when it is empty."""
    return read_region(region, lambda slices: tensor[slices])


def _read_dims(
    dims: Sequence[tuple[Interval, ...]],
    chosen: tuple[slice, ...],
    read: Callable[[tuple[slice, ...]], torch.Tensor],
) -> torch.Tensor:
    if len(chosen) == len(dims):
        return read(chosen)
    parts = [
        _read_dims(dims, (*chosen, slice(start, stop)), read)
        for start, stop in dims[len(chosen)]
        if stop > start
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, len(chosen))


def _splitting_order(placements: Sequence[Placement], dim: int, ndim: int) -> list[int]:
    """Mesh axes that split `dim`, first split first.

    A strided placement says that the axes to its right have split before it.
    """
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        split = getattr(placement, "dim", None)
        if split is None:
            raise ValueError(f"cannot load into a tensor placed as {placement}")
        if split % ndim == dim:
            if isinstance(placement, _StridedShard):
                order.append(axis)
            else:
                order.insert(0, axis)
    return order


def _follows_inner(placements: Sequence[Placement], axis: int, sizes: Sequence[int]) -> bool:
    """Whether a strided placement only says that inner axes have split the same dim before."""
    placement = placements[axis]
    assert isinstance(placement, _StridedShard)
    inner = 1
    for other in range(axis + 1, len(placements)):
        if getattr(placements[other], "dim", None) == placement.dim:
            inner *= sizes[other]
    return inner > 1 and inner == int(placement.split_factor)


def _chunk(
    intervals: tuple[Interval, ...], pieces: int, parts: int, part: int
) -> tuple[Interval, ...]:
    """Chunk `part` of `parts` of each of `pieces` chunks of what the intervals hold, joined."""
    length = sum(stop - start for start, stop in intervals)
    chosen: list[Interval] = []
    for piece in range(pieces):
        start, stop = _bounds(length, pieces, piece)
        first, last = _bounds(stop - start, parts, part)
        chosen += _cut(intervals, start + first, start + last)
    return tuple(chosen) or ((0, 0),)


def _bounds(length: int, parts: int, part: int) -> Interval:
    step = -(-length // parts)
    return min(part * step, length), min((part + 1) * step, length)


def _cut(intervals: tuple[Interval, ...], first: int, last: int) -> list[Interval]:
    """What lies at places `first` to `last` of the intervals laid end to end."""
    chosen = []
    place = 0
    for start, stop in intervals:
        low = max(first - place, 0)
        high = min(last - place, stop - start)
        if high > low:
            chosen.append((start + low, start + high))
        place += stop - start
    return chosen
