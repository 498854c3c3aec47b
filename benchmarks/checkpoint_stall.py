"""How long a checkpoint stops training: synchronous, torch's asynchronous default, and ndtrain's.

    python benchmarks/checkpoint_stall.py [--hidden 768] [--layers 12] [--device cpu|cuda]

Each way saves the same model and AdamW states between the same steps. Blocked time is the call
itself plus any wait before the next optimizer step; the bandwidth is that of the whole save.
Prints a table and, with --json, writes the numbers.
"""

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ndtrain.parallel import runtime as runtimes
from ndtrain.train.checkpoint import Checkpointer
from ndtrain.train.state import Progress


@dataclass
class Row:
    """One way of saving."""

    way: str
    blocked_seconds: float
    whole_seconds: float
    gigabytes: float
    blocked_share: float = 0.0

    @property
    def gigabytes_per_second(self) -> float:
        return self.gigabytes / self.whole_seconds


def build(
    hidden: int, layers: int, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    blocks = [
        nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        for _ in range(layers)
    ]
    model = nn.Sequential(*blocks).to(device)
    mesh = init_device_mesh(device.type, (1,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


Save = Callable[[int], float]
"""Save after a step and train on until it is done; returns the blocked seconds."""


def measure(way: str, save: Save, gigabytes: float, repeats: int) -> Row:
    """The median of `repeats` saves, after one that fills caches and buffers."""
    blocked, whole = [], []
    for number in range(repeats + 1):
        started = time.perf_counter()
        seconds = save(number)
        if number:
            blocked.append(seconds)
            whole.append(time.perf_counter() - started)
    return Row(way, statistics.median(blocked), statistics.median(whole), gigabytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()

    runtime = runtimes.start(None, device=options.device)
    device = runtime.device
    model, optimizer = build(options.hidden, options.layers, device)
    inputs = torch.randn(options.rows, options.hidden, device=device)
    take_step(model, optimizer, inputs)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    gigabytes = parameters * 12 / 1e9
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="checkpoint-stall-"))

    def ours(asynchronous: bool) -> Save:
        keeper = Checkpointer(
            folder / f"ndtrain-{asynchronous}",
            runtime=runtime,
            run_id="benchmark",
            limit=1,
            asynchronous=asynchronous,
        )

        def save(number: int) -> float:
            wait_for_device(device)
            keeper.save(number + 1, model, optimizer, Progress(number + 1))
            while keeper.is_saving:
                take_step(model, optimizer, inputs)
                if saved := keeper.poll():
                    return saved[0].blocked_seconds
            return keeper.poll()[0].blocked_seconds

        return save

    def torchs_default(number: int) -> float:
        target = folder / "torch"
        shutil.rmtree(target, ignore_errors=True)
        wait_for_device(device)
        started = time.perf_counter()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        future = async_save(
            {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=target
        )
        blocked = time.perf_counter() - started
        while not future.done():
            take_step(model, optimizer, inputs)
        future.result()
        return blocked

    step = statistics.median(timed_steps(model, optimizer, inputs, device))
    rows = [
        measure("synchronous", ours(False), gigabytes, options.repeats),
        measure("torch's async_save", torchs_default, gigabytes, options.repeats),
        measure("ndtrain", ours(True), gigabytes, options.repeats),
    ]
    for row in rows:
        row.blocked_share = row.blocked_seconds / rows[0].blocked_seconds
    print(f"{parameters / 1e6:.0f} M parameters, {gigabytes:.2f} GB a save, step {step:.3f} s")
    print(f"{'':20} {'blocked s':>10} {'share':>8} {'whole s':>9} {'GB/s':>7}")
    for row in rows:
        print(
            f"{row.way:20} {row.blocked_seconds:10.4f} {row.blocked_share:8.1%} "
            f"{row.whole_seconds:9.3f} {row.gigabytes_per_second:7.2f}"
        )
    shutil.rmtree(folder)
    if options.json:
        facts = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "machine": platform.machine(),
            "torch": torch.__version__,
            "parameters": parameters,
            "step_seconds": step,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    runtimes.stop(runtime)


def timed_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, device: torch.device
) -> list[float]:
    seconds = []
    for _ in range(4):
        wait_for_device(device)
        started = time.perf_counter()
        take_step(model, optimizer, inputs)
        wait_for_device(device)
        seconds.append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    main()
