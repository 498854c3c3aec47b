"""The device mesh: four axes that are always there, and the groups cut from them.

Two views of the same ranks exist side by side. `axes` has the four axes of the recipe. `states`
has dp_replicate, `fsdp` (dp_shard and cp folded into one) and tp: parameters live on it, because
ranks that share a sequence also share the shards of the weights.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ndtrain.plan.plan import AXES, ParallelPlan


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the mesh.

    Attributes:
        axes: (dp_replicate, dp_shard, cp, tp).
        states: (dp_replicate, fsdp, tp) over the same ranks, where fsdp = dp_shard × cp.
        loss: the ranks whose token losses are summed: all that share this tp coordinate.
    """

    plan: ParallelPlan
    device: torch.device
    axes: DeviceMesh
    states: DeviceMesh
    loss: dist.ProcessGroup

    @property
    def tp(self) -> DeviceMesh:
        """Ranks that share each big matrix."""
        return self.states["tp"]

    @property
    def fsdp(self) -> DeviceMesh:
        """Ranks that share one copy's states, with the copies as outer axis when there are any."""
        if self.plan.dp_replicate > 1:
            return self.states["dp_replicate", "fsdp"]
        return self.states["fsdp"]

    @property
    def fsdp_group(self) -> dist.ProcessGroup:
        """Ranks over which each parameter is split in rows."""
        return self.states.get_group("fsdp")

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """Process group of `tp`."""
        return self.states.get_group("tp")

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """Ranks that share one sequence."""
        return self.axes.get_group("cp")

    @property
    def data_rank(self) -> int:
        """Which share of the rows this rank reads: equal for ranks that differ in cp or tp only."""
        replicate = self.axes.get_local_rank("dp_replicate")
        return replicate * self.plan.dp_shard + self.axes.get_local_rank("dp_shard")

    @property
    def cp_rank(self) -> int:
        """Which part of each sequence this rank holds."""
        return self.axes.get_local_rank("cp")

    @property
    def tp_rank(self) -> int:
        """Which part of each big matrix this rank holds."""
        return self.axes.get_local_rank("tp")


def build_mesh(plan: ParallelPlan, device: torch.device) -> Mesh:
    """Build the mesh over all ranks of the initialised process group.

    Args:
        plan: axis sizes whose product is the size of the process group.
        device: this rank's device; its type decides the backend.
    """
    axes = init_device_mesh(device.type, plan.sizes, mesh_dim_names=AXES)
    states = init_device_mesh(
        device.type,
        (plan.dp_replicate, plan.dp_shard * plan.cp, plan.tp),
        mesh_dim_names=("dp_replicate", "fsdp", "tp"),
    )
    loss = axes["dp_replicate", "dp_shard", "cp"]._flatten("loss").get_group()
    return Mesh(plan, device, axes, states, loss)
