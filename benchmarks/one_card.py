"""Several ranks on one card, under NCCL, for machines that have no second one.

NCCL refuses two ranks of one host on one device. When each rank poses as a host of its own, it
sends over sockets instead: the same code gives the same sums, on the streams and in the order of a
machine with many cards. Nothing of that is fast.
"""

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ndtrain.environment import LaunchedRank
from ndtrain.launch import LaunchOptions, launch


def host_variables(number: int) -> dict[str, str]:
    """What lets NCCL take a process for one of another host, in little memory."""
    name = {"NCCL_HOSTID": f"host-{number}", "NCCL_SOCKET_IFNAME": "lo"}
    return {**name, "NCCL_BUFFSIZE": "1048576", "NCCL_MAX_NCHANNELS": "2"}


def free_endpoint() -> str:
    """Where the posing hosts meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def launch_on_one_card(
    job: Any, run_rank: Callable[[Any, LaunchedRank | None], int], options: LaunchOptions
) -> int:
    """`launch` with one posing host a rank; returns the first exit code that is not 0."""
    if options.world_size == 1:
        return launch(job, run_rank, options)
    endpoint, ranks = free_endpoint(), range(options.world_size)
    clean = multiprocessing.get_context("spawn")
    hosts = [
        clean.Process(
            target=_pose,
            args=(
                job,
                run_rank,
                replace(options, num_nodes=len(ranks), node_rank=rank, endpoint=endpoint),
            ),
        )
        for rank in ranks
    ]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join()
    return next((host.exitcode or 0 for host in hosts if host.exitcode), 0)


def _pose(
    job: Any, run_rank: Callable[[Any, LaunchedRank | None], int], options: LaunchOptions
) -> None:
    os.environ.update(host_variables(options.node_rank))
    sys.exit(launch(job, run_rank, options))


def run_on_one_card(command: Sequence[str], hosts: int) -> None:
    """Run an `ndtrain` command that takes `--nnodes` on so many posing hosts.

    Raises:
        RuntimeError: one of them failed; with the end of what it said.
    """
    meeting = ["--nnodes", str(hosts), "--rdzv-endpoint", free_endpoint(), "--node-rank"]
    running = [
        subprocess.Popen(
            [*command, *meeting, str(number)],
            env={**os.environ, **host_variables(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(hosts)
    ]
    said = [process.communicate()[0] for process in running]
    for process, words in zip(running, said, strict=True):
        if process.returncode:
            raise RuntimeError(words[-3000:])
