"""The whole of a sharded tensor on every rank, wherever its parts lie.

torch's own redistribution takes a shard of a dim that does not divide for another part than the
one that sharding gave the rank, and warns in the user's terminal where two axes split one dim.
Here every rank's part follows from the mesh (`ndtrain.model.regions`).
"""

import itertools
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ndtrain.model.regions import Region, local_region, local_tensor


@torch.no_grad()
def whole_of(tensor: DTensor) -> torch.Tensor:
    """All of `tensor`; every rank of its mesh calls it.

    One gather for each axis that splits it, of parts that are padded to the longest.
    """
    mesh = tensor.device_mesh
    split = [axis for axis, kind in enumerate(tensor.placements) if not kind.is_replicate()]
    places = [region for _, region in places_of(tensor)]
    part = local_tensor(tensor)
    gathered = part.new_zeros(max(prod(region.shape) for region in places))
    gathered[: part.numel()] = part.reshape(-1)
    for axis in reversed(split):
        received = gathered.new_empty(mesh.size(axis) * gathered.numel())
        dist.all_gather_into_tensor(received, gathered, group=mesh.get_group(axis))
        gathered = received
    whole = part.new_empty(tensor.shape)
    for region, values in zip(places, gathered.view(len(places), -1), strict=True):
        put_region(whole, values[: prod(region.shape)].view(region.shape), region)
    return whole


def places_of(tensor: DTensor) -> list[tuple[int, Region]]:
    """Ranks of this rank's mesh that together hold the tensor once, with their parts."""
    mesh = tensor.device_mesh
    places = []
    for place in itertools.product(*(range(size) for size in mesh.shape)):
        is_copy = any(
            at and placement.is_replicate()
            for at, placement in zip(place, tensor.placements, strict=True)
        )
        if not is_copy:
            region = local_region(tensor.shape, tensor.placements, mesh.shape, place)
            places.append((int(mesh.mesh[place]), region))
    return places


def put_region(whole: torch.Tensor, part: torch.Tensor, region: Region) -> None:
    """Copy a part into its place, interval by interval."""
    starts = [list(itertools.accumulate((b - a for a, b in dim), initial=0)) for dim in region.dims]
    for choice in itertools.product(*(range(len(dim)) for dim in region.dims)):
        target = tuple(slice(*dim[one]) for dim, one in zip(region.dims, choice, strict=True))
        source = tuple(
            slice(start[one], start[one + 1]) for start, one in zip(starts, choice, strict=True)
        )
        whole[target] = part[source]
