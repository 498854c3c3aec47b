"""What a launch needs to know beside the job."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ndtrain.errors import MeshError
from ndtrain.plan.plan import ranks_per_node


@dataclass(frozen=True)
class LaunchOptions:
    """How many ranks to start, where, and what to do when one fails.

    Attributes:
        world_size: ranks over all nodes.
        run_dir: the run's directory; ranks log to its `logs/`.
        max_restarts: how often the whole set may be restarted after a lost rank.
        timeout_seconds: after which a collective counts as hanging.
        num_nodes: machines that run this same command.
        node_rank: number of this machine; 0 hosts the store.
        endpoint: host:port of machine 0, needed for several nodes.
    """

    world_size: int
    run_dir: Path
    device: Literal["auto", "cuda", "cpu"] = "auto"
    max_restarts: int = 0
    timeout_seconds: float = 1800
    num_nodes: int = 1
    node_rank: int = 0
    endpoint: str | None = None

    def __post_init__(self) -> None:
        ranks_per_node(self.world_size, self.num_nodes, option="--nnodes")
        if not 0 <= self.node_rank < self.num_nodes:
            raise MeshError(
                f"node rank {self.node_rank} is not below the number of nodes, {self.num_nodes}.",
                where="--node-rank",
                hint="Give every node its own number, from 0 on.",
            )
        if self.num_nodes > 1 and self.endpoint is None:
            raise MeshError(
                "Several nodes need a place to meet.",
                where="--rdzv-endpoint",
                hint="Give node 0's host and a free port to every node, like gpu-node-0:29400.",
            )

    @property
    def local_world_size(self) -> int:
        """Ranks on this node."""
        return self.world_size // self.num_nodes

    @property
    def logs(self) -> Path:
        """Folder of one log a rank."""
        return self.run_dir / "logs"

    @property
    def status(self) -> Path:
        """The run's status file."""
        return self.run_dir / "status.json"
