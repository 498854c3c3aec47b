"""Every row that a target exists for: which runs it needs, and what it has to reach.

`all_rows.py` runs them. Seconds are what a run takes on H200, from its start to its end; they
decide what still fits a time budget.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engines import tokens_per_second
from workloads import WORKS

Results = Mapping[str, Mapping[str, Any]]
"""What each run came to, by the run's name: `8b-lora/ndtrain`, `8b-lora/accelerate`, `meshes`."""


@dataclass(frozen=True)
class Run:
    """One process tree on some GPUs.

    Attributes:
        name: its key in the results.
        work: the piece of work, None for a script.
        peer: a peer's name and batch; None: ndtrain itself, or a script.
        script: file in this folder and its arguments; it writes what `--json` names.
    """

    name: str
    seconds: float
    work: str | None = None
    peer: tuple[str, int] | None = None
    script: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """Runs that follow each other on the same GPUs, so that their ratios are of one machine."""

    name: str
    gpus: int
    runs: tuple[Run, ...]

    @property
    def seconds(self) -> float:
        """Of all its runs."""
        return sum(run.seconds for run in self.runs)


def _ours(name: str, seconds: float) -> Run:
    return Run(f"{name}/ndtrain", seconds, work=name)


def _peers(name: str, seconds: float) -> tuple[Run, ...]:
    return tuple(
        Run(f"{name}/{peer[0]}", seconds, work=name, peer=peer) for peer in WORKS[name].peers
    )


def _speed(name: str, ours: float, peers: float = 0) -> Job:
    return Job(name, WORKS[name].ranks, (_ours(name, ours), *_peers(name, peers)))


def _script(name: str, gpus: int, seconds: float, *words: str) -> Job:
    return Job(name, gpus, (Run(name, seconds, script=words),))


JOBS: tuple[Job, ...] = (
    # what needs four comes first, since only such a machine can measure it
    _speed("8b-full-4", 70, 70),
    _speed("8b-full-4-packed", 60),
    _speed("8b-lora-4", 50),
    Job("8b-cp4-128k", 4, (_ours("8b-cp4-128k", 110),)),
    _speed("8b-tp2-shard2", 60),
    _speed("8b-cp4-32k", 60),
    _speed("8b-cp4-64k", 70),
    _speed("8b-replicate2-shard2", 60),
    _speed("8b-tp4", 60),
    _speed("8b-tp2-shard2-async", 60),
    _speed("8b-tp4-async", 60),
    _script("meshes-4", 4, 240, "mesh_check.py", "--gpus", "4"),
    Job("8b-cp4-128k-peer", 4, _peers("8b-cp4-128k", 170)),
    # four times its rate is what the four of 8b-lora-4 are held to
    _speed("8b-lora", 50, 50),
    _script("start-up-4", 4, 150, "start_up.py", "--work", "8b-full-4"),
    _script("resume-4", 4, 180, "mesh_resume.py", "--gpus", "4"),
    _script("plan-order", 4, 180, "plan_order.py", "--gpus", "4"),
    _speed("8b-checkpoint-4", 220),
    _speed("8b-full-4-bf16-reduce", 60),
    _speed("8b-cp4-512k", 360),
    _speed("8b-full-2", 70, 70),
    _speed("8b-cp2-32k", 80, 110),
    _script("meshes-2", 2, 150, "mesh_check.py", "--gpus", "2"),
    _script("resume-2", 2, 90, "mesh_resume.py", "--gpus", "2"),
    _speed("alpaca-packed", 50, 70),
    _speed("1b-full-4k", 40),
    _speed("1b-full", 45, 45),
    _speed("qwen3-0.6b-full", 45, 50),
    _speed("8b-full-bf16-states", 70),
    _script("start-up-1", 1, 90, "start_up.py", "--work", "8b-lora"),
    _script("kernels", 1, 240, "gpu_check.py", "--steps", "50", "--quick"),
)

EARLIER: Mapping[str, float] = {
    # tokens/s a GPU of peers on H200 in an earlier measurement: more than 5 % off needs a reason
    "8b-lora/accelerate": 9988,
    "8b-lora/accelerate-ckpt": 7127,
    "1b-full/accelerate": 37414,
    "1b-full/accelerate-ckpt": 30958,
    "alpaca-packed/trl": 7480,
    "alpaca-packed/trl-packing-liger": 14400,
    "8b-full-4/accelerate-fsdp": 8381,
    "8b-full-4/accelerate-fsdp-ckpt": 6866,
    "8b-full-4/torchtitan": 8815,
    "8b-full-2/accelerate-fsdp-ckpt": 6741,
    "8b-full-2/torchtitan": 8705,
    "8b-cp2-32k/accelerate-cp-ckpt": 4931,
}


@dataclass(frozen=True)
class Target:
    """One thing to reach.

    Attributes:
        what: the row, in words.
        needs: runs without which nothing can be said.
        value: the figure, out of the results of those runs.
        wanted: at least this, or at most.
        percent: the figure is a share.
    """

    what: str
    needs: tuple[str, ...]
    value: Callable[[Results], float | None]
    wanted: float
    at_most: bool = False
    percent: bool = False

    def verdict(self, found: float | None) -> str:
        """`met` or `missed`; `no figure` when the runs did not give it."""
        if found is None:
            return "no figure"
        met = found <= self.wanted if self.at_most else found >= self.wanted
        return "met" if met else "missed"

    def show(self, number: float | None) -> str:
        """A figure as the table prints it."""
        if number is None:
            return "-"
        if self.percent:
            return f"{100 * number:.3g} %"
        return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def speed(results: Results, run: str) -> float | None:
    """Tokens a second and GPU of a run of the results."""
    result = results[run]
    if "seconds" not in result:
        return None
    return tokens_per_second(result, WORKS[run.partition("/")[0]].ranks)


def _share(one: str, other: str) -> Callable[[Results], float | None]:
    def value(results: Results) -> float | None:
        first, second = speed(results, one), speed(results, other)
        return first / second if first and second else None

    return value


def _ratio(work: str, peer: str, wanted: float) -> Target:
    ours, other = f"{work}/ndtrain", f"{work}/{peer}"
    return Target(f"{work}: times {peer}", (ours, other), _share(ours, other), wanted)


def _tokens(work: str, wanted: float) -> Target:
    run = f"{work}/ndtrain"
    return Target(f"{work}: tokens/s/GPU", (run,), lambda found: speed(found, run), wanted)


def _part(one: str, of: str, wanted: float) -> Target:
    runs = (f"{one}/ndtrain", f"{of}/ndtrain")
    what = f"{one}: of {of}, a GPU"
    return Target(what, runs, _share(*runs), wanted, percent=True)


def _most(what: str, run: str, key: str, wanted: float, *, percent: bool = False) -> Target:
    return Target(
        what, (run,), lambda found: found[run].get(key), wanted, at_most=True, percent=percent
    )


def _plan_errors(of: str, against: str) -> Callable[[Results], float | None]:
    def value(results: Results) -> float | None:
        errors = [
            abs(result[of] / result[against] - 1)
            for result in results.values()
            if of in result and against in result
        ]
        return max(errors, default=None)

    return value


def _blocked(results: Results) -> float | None:
    # the first save, which also allocates the buffers that later ones use: those may have to wait
    # until it is written, on a disk that is slower than the steps between
    found = results["8b-checkpoint-4/ndtrain"].get("blocked_seconds")
    return float(found[0]) if found else None


def _rows_trained(results: Results) -> float | None:
    return 524288 if results["8b-cp4-512k/ndtrain"].get("counted_steps") else None


def _meshes(gpus: int) -> tuple[Target, ...]:
    run = f"meshes-{gpus}"
    return (
        _most(f"{run}: loss, fp32", run, "fp32_loss", 1e-4),
        _most(f"{run}: loss, 20 steps of bf16", run, "bf16_loss", 0.005, percent=True),
        _most(f"{run}: grad norm, 20 steps of bf16", run, "bf16_grad_norm", 0.02, percent=True),
        _most(f"resume-{gpus}: loss after another mesh's save", f"resume-{gpus}", "loss", 1e-4),
    )


def _start(run: str) -> tuple[Target, ...]:
    return (
        _most(f"{run}: command to end of step 1, cold", run, "cold_seconds", 45),
        _most(f"{run}: the same, warm", run, "warm_seconds", 20),
        _most(f"{run}: first line that needed torch", run, "first_line_seconds", 6),
    )


TARGETS: tuple[Target, ...] = (
    _ratio("8b-full-4", "accelerate-fsdp", 1.22),
    _ratio("8b-full-4", "accelerate-fsdp-ckpt", 1.5),
    _ratio("8b-full-4", "torchtitan", 1.0),
    _most("8b-full-4: GiB", "8b-full-4/ndtrain", "memory_gib", 65),
    _tokens("8b-full-4", 10_300),
    _part("8b-full-4-packed", "8b-full-4", 0.95),
    _part("8b-lora-4", "8b-lora", 0.97),
    _tokens("8b-cp4-32k", 6_300),
    _tokens("8b-cp4-64k", 4_300),
    _tokens("8b-cp4-128k", 2_600),
    _ratio("8b-cp4-128k", "accelerate-cp-ckpt", 1.8),
    Target("longest row, cp 4", ("8b-cp4-512k/ndtrain",), _rows_trained, 524288),
    _tokens("8b-tp2-shard2", 9_000),
    _tokens("8b-tp4", 7_500),
    _part("8b-replicate2-shard2", "8b-full-4", 0.95),
    Target("8b-checkpoint-4: blocked s", ("8b-checkpoint-4/ndtrain",), _blocked, 1, at_most=True),
    *_meshes(4),
    *_start("start-up-4"),
    _ratio("8b-full-2", "accelerate-fsdp-ckpt", 1.47),
    _tokens("8b-full-2", 9_900),
    _ratio("8b-cp2-32k", "accelerate-cp-ckpt", 1.4),
    _tokens("8b-cp2-32k", 6_900),
    *_meshes(2),
    _ratio("8b-lora", "accelerate", 1.45),
    _ratio("8b-lora", "accelerate-ckpt", 2.0),
    _most("8b-lora: GiB", "8b-lora/ndtrain", "memory_gib", 42),
    _ratio("1b-full", "accelerate", 1.35),
    _ratio("1b-full", "accelerate-ckpt", 1.65),
    _most("1b-full: GiB", "1b-full/ndtrain", "memory_gib", 60),
    _ratio("alpaca-packed", "trl", 5),
    _ratio("alpaca-packed", "trl-packing-liger", 3),
    _part("alpaca-packed", "1b-full-4k", 0.95),
    _ratio("qwen3-0.6b-full", "trainer", 1.6),
    _tokens("8b-full-bf16-states", 10_500),
    _most("8b-lora: waits for the host", "8b-lora/ndtrain", "host_share", 0.01, percent=True),
    _most("8b-full-4: waits for the host", "8b-full-4/ndtrain", "host_share", 0.01, percent=True),
    _most("8b-full-2: waits for the host", "8b-full-2/ndtrain", "host_share", 0.01, percent=True),
    *_start("start-up-1"),
    _most("kernels: 50 steps of compiled bf16", "kernels", "loss", 0.01, percent=True),
    Target(
        "plan: memory of all runs above",
        (),
        _plan_errors("predicted_memory_gib", "memory_gib"),
        0.1,
        at_most=True,
        percent=True,
    ),
    Target(
        "plan: step time of all runs above",
        (),
        _plan_errors("predicted_seconds", "seconds"),
        0.15,
        at_most=True,
        percent=True,
    ),
    Target(
        "plan: three best meshes in order (1 = yes)",
        ("plan-order",),
        lambda found: found["plan-order"].get("in_order"),
        1,
    ),
)
