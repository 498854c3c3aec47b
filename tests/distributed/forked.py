"""Runs a function on several gloo ranks, forked from the test so that imports are paid once."""

import gc
import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_forked(
    world_size: int, folder: Path, work: Callable[..., Any], *arguments: Any, seconds: int = 240
) -> list[Any]:
    """What `work(rank, *arguments)` returns on each rank of a fresh gloo process group."""
    context = multiprocessing.get_context("fork")
    store = folder / f"store-{world_size}-{work.__name__}"
    results = [folder / f"{store.name}-{rank}.pickle" for rank in range(world_size)]
    ranks = [
        context.Process(
            target=_rank, args=(rank, world_size, store, results[rank], work, arguments)
        )
        for rank in range(world_size)
    ]
    # Garbage of earlier tests may hold process groups, whose destructors crash a fork.
    gc.disable()
    for process in ranks:
        process.start()
    gc.enable()
    for process in ranks:
        process.join(seconds)
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    returned = []
    for rank, path in enumerate(results):
        assert path.exists(), f"rank {rank} left no result (exit code {ranks[rank].exitcode})"
        value, failure = pickle.loads(path.read_bytes())
        assert failure is None, f"rank {rank} failed:\n{failure}"
        returned.append(value)
    return returned


def _rank(
    rank: int,
    world_size: int,
    store: Path,
    result: Path,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    gc.freeze()
    gc.enable()
    torch.set_num_threads(1)
    value, failure = None, None
    try:
        dist.init_process_group(
            "gloo", rank=rank, world_size=world_size, init_method=f"file://{store}"
        )
        value = work(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        failure = traceback.format_exc()
    partial = result.with_suffix(".partial")
    partial.write_bytes(pickle.dumps((value, failure)))
    partial.replace(result)
