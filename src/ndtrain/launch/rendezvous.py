"""Where the ranks meet: a store hosted by the launcher, on this machine or on node 0.

The launchers of several nodes agree through the same store: which attempt is on, who has joined
it, and whether the run is over. So a node that is lost and started again is let in by a new
attempt of all, and a failure on one node ends the others within seconds.
"""

import datetime
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++

from ndtrain.environment import LaunchedRank
from ndtrain.errors import MeshError
from ndtrain.launch.network import interface_towards, loopback_interface
from ndtrain.launch.options import LaunchOptions
from ndtrain.launch.store_host import StoreHost
from ndtrain.launch.verdict import Verdict, read_verdict, write_verdict

T = TypeVar("T")

DEFAULT_PORT = 29400
_POLL_SECONDS = 0.5
_FAREWELL_SECONDS = 10.0
_HEARSAY_SECONDS = 8.0
"""Longer than a launcher waits for its ranks' reports before it judges."""


class Meeting:
    """The store of a run and the attempts that take place in it.

    Attributes:
        attempt: number of the current attempt, the same on every node.
        interface: network interface over which this node reaches the others.
    """

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._looked_at = 0.0
        self._over = False
        self.attempt = 0
        if options.num_nodes == 1:
            self._address, port = "127.0.0.1", 0
            self.interface = loopback_interface()
        else:
            self._address, port = split_endpoint(options.endpoint or "")
            self.interface = interface_towards(self._address)
        self._host = self._open_host(port) if options.node_rank == 0 else None
        self._port = self._host.port if self._host is not None else port
        self._store = self._connect() if options.num_nodes > 1 else None

    def rank(self, local_rank: int) -> LaunchedRank:
        """The place of this node's rank number `local_rank` in the current attempt."""
        local = self._options.local_world_size
        return LaunchedRank(
            rank=self._options.node_rank * local + local_rank,
            world_size=self._options.world_size,
            local_rank=local_rank,
            local_world_size=local,
            run_id=f"{self._address}:{self._port}",
            launcher="ndtrain",
            attempt=self.attempt,
            address=self._address,
            port=self._port,
            hosts_store=True,
        )

    def join(self) -> Verdict | None:
        """Wait for every node to take part in the newest attempt.

        Returns:
            The verdict of the run when it is over already.

        Raises:
            MeshError: a node does not come.
        """
        if self._options.num_nodes == 1:
            return None
        deadline = time.monotonic() + self._options.timeout_seconds
        joined: int | None = None
        while True:
            if (verdict := self.verdict()) is not None:
                return verdict
            self.attempt = self._ask(self._read_attempt)
            if joined != self.attempt:
                joined = self.attempt
                if self._ask(lambda: self._shared.add(self._seat(self._options.node_rank), 1)) > 1:
                    # This node's former self took part in it: all must begin anew.
                    self._advance()
                    continue
            absent = self._ask(self._absent_nodes)
            if not absent:
                self._over = False
                return None
            if time.monotonic() > deadline:
                raise MeshError(
                    f"Node {', '.join(map(str, absent))} did not come within "
                    f"{self._options.timeout_seconds:g} s.",
                    where=f"--rdzv-endpoint {self._options.endpoint}",
                    hint="Start the same command there with its own --node-rank, or raise "
                    "ddp_timeout.",
                )
            time.sleep(_POLL_SECONDS)

    def is_over(self) -> bool:
        """Whether another node has ended this attempt; asks the store only now and then."""
        if self._options.num_nodes == 1 or self._over:
            return self._over
        if time.monotonic() - self._looked_at >= _POLL_SECONDS:
            self._looked_at = time.monotonic()
            try:
                self._over = self._shared.check(["verdict"]) or self._read_attempt() != self.attempt
            except dist.DistError:
                # Node 0 is gone, and the store with it.
                self._over = True
        return self._over

    def next_attempt(self) -> bool:
        """Move on to another attempt, if one is left."""
        if self.attempt >= self._options.max_restarts:
            return False
        if self._options.num_nodes == 1:
            self.attempt += 1
        else:
            self._ask(self._advance)
        return True

    def end(self, verdict: Verdict) -> None:
        """Tell the other nodes how the run ended, and let them leave before the store goes."""
        if self._options.num_nodes == 1:
            return
        try:
            if verdict.error is not None:
                self._shared.set("verdict", write_verdict(verdict, self._options.node_rank))
            self._shared.set(f"left/{self._options.node_rank}", "")
            if self._options.node_rank == 0:
                self._wait_for_farewells()
        except dist.DistError:
            # Node 0 left first: there is nobody to tell any more.
            return

    def verdict(self, *, after: Verdict | None = None) -> Verdict | None:
        """The verdict of the node that ended the run, None while it goes on.

        Args:
            after: this node's own one; when it is hearsay, the node that knows gets time.
        """
        if self._options.num_nodes == 1:
            return None
        deadline = time.monotonic() + (_HEARSAY_SECONDS if after and after.is_hearsay else 0)
        while not self._ask(lambda: self._shared.check(["verdict"])):
            advanced = self._ask(self._read_attempt) != self.attempt
            if advanced or time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS / 5)
        return read_verdict(self._ask(lambda: self._shared.get("verdict")).decode())

    def close(self) -> None:
        """End the store, if this node holds it."""
        if self._host is not None:
            self._host.close()

    def _wait_for_farewells(self) -> None:
        seats = [f"left/{node}" for node in range(self._options.num_nodes)]
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while not self._shared.check(seats) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 5)

    @property
    def _shared(self) -> TCPStore:
        """The store as the launchers of several nodes use it; one node alone needs no client."""
        assert self._store is not None
        return self._store

    def _absent_nodes(self) -> list[int]:
        nodes = range(self._options.num_nodes)
        return [node for node in nodes if not self._shared.check([self._seat(node)])]

    def _seat(self, node: int) -> str:
        return f"joined/{self.attempt}/{node}"

    def _read_attempt(self) -> int:
        return int(self._shared.add("attempt", 0))

    def _advance(self) -> None:
        """Open the next attempt, unless another node has opened it already."""
        if self._shared.add(f"opened/{self.attempt + 1}", 1) == 1:
            self._shared.add("attempt", 1)

    def _ask(self, question: Callable[[], T]) -> T:
        """Ask the store; when node 0 has been started again, its new store."""
        try:
            return question()
        except dist.DistError:
            if self._options.node_rank == 0 or self.attempt >= self._options.max_restarts:
                raise MeshError(
                    "Node 0 is gone, and with it the place where the nodes meet.",
                    where=f"--rdzv-endpoint {self._options.endpoint}",
                    hint="Look at its log, then start every node again.",
                ) from None
            self._store = self._connect()
            self.attempt = self._read_attempt()
            return question()

    def _open_host(self, port: int) -> StoreHost:
        try:
            return StoreHost(self._address, port)
        except OSError as error:
            raise MeshError(
                f"The meeting place cannot be opened: {error}.",
                where=f"--rdzv-endpoint {self._options.endpoint or self._address}",
                hint="Choose a free port on node 0.",
            ) from error

    def _connect(self) -> TCPStore:
        try:
            return TCPStore(
                self._address,
                self._port,
                is_master=False,
                timeout=datetime.timedelta(seconds=self._options.timeout_seconds),
            )
        except (dist.DistError, RuntimeError) as error:
            first_line = str(error).split("\n")[0]
            raise MeshError(
                f"The meeting place cannot be reached: {first_line}",
                where=f"--rdzv-endpoint {self._options.endpoint}",
                hint="Start node 0 too, and name a port of it that every node can reach.",
            ) from error


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of `host`, `host:port` or `[v6]:port`.

    Raises:
        MeshError: the port is no number.
    """
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint, str(DEFAULT_PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise MeshError(
            f"'{endpoint}' is no place to meet.",
            where="--rdzv-endpoint",
            hint="Write the host of node 0 and a free port, like gpu-node-0:29400.",
        )
    return host.strip("[]"), int(port)
