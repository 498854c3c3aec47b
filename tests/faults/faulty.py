"""Runs the real command line, disturbs it at a chosen moment, and compares what is left.

Commands are forked from the test process, which has imported everything once: what runs is
`ndtrain.cli.main` with its own launcher and ranks, without ten seconds of imports each time.
"""

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from ndtrain.launch.status import RunStatus, read_status
from ndtrain.train import checkpoint_files as files

RECIPE = """
model_config:
  model_type: llama
  hidden_size: 32
  intermediate_size: 48
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  vocab_size: 320
  max_position_embeddings: 256
tokenizer_config: bytes
datasets:
  - path: {data}
    type: alpaca
val_set_size: 8
sequence_len: 256
micro_batch_size: 1
global_batch_size: 4
max_steps: {steps}
learning_rate: 0.003
weight_decay: 0.1
device: cpu
ddp_timeout: 60
logging_steps: 1
save_steps: 3
save_total_limit: 3
eval_steps: 7
output_dir: {output}
"""

FOUR_RANKS = "dp_replicate_size: 2\ndp_shard_size: 2\n"
WITH_DROPOUT = (
    "adapter: lora\nlora_r: 4\nlora_target_linear: true\nlora_dropout: 0.2\n"
    "peft_init_lora_weights: false\n"
)
STEPS = 24


def write_recipe(
    folder: Path,
    *,
    output: Path | None = None,
    steps: int = STEPS,
    keys: str = FOUR_RANKS,
    rows: int = 60,
) -> Path:
    """A tiny recipe over its own rows; its run directory is `folder`/run."""
    draw = random.Random(7)
    written = [
        {
            "instruction": f"Repeat {draw.randint(0, 999)}",
            "input": "",
            "output": "".join(draw.choices("abcdefgh ", k=draw.randint(5, 40))),
        }
        for _ in range(rows)
    ]
    data = folder / "rows.json"
    data.write_text(json.dumps(written))
    recipe = folder / "recipe.yaml"
    text = RECIPE.format(data=data, output=output or folder / "run", steps=steps)
    recipe.write_text(text + keys)
    return recipe


@dataclass
class Command:
    """A running `ndtrain` command; `pid` is the launcher's."""

    pid: int
    output: Path
    code: int | None = None

    def poll(self) -> int | None:
        """The exit code when it has ended, negative for a signal."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, seconds: float = 120) -> int:
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"still running after {seconds} s:\n{self.text()}")
            time.sleep(0.005)
        return code

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in order of rank; the first child holds the store."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except FileNotFoundError:
            return []
        return sorted(int(pid) for pid in children.split())[1:]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let the ranks stand still meanwhile, however slow this machine is."""
        ranks = self.ranks()
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in ranks:
                os.kill(pid, signal.SIGCONT)


def start(folder: Path, *arguments: str) -> Command:
    """Start `ndtrain` with these arguments in a forked process of its own."""
    # Imported in the test process, so that every fork finds them ready.
    import ndtrain.train.run
    from ndtrain import cli

    assert ndtrain.train.run
    number = len(list(folder.glob("output-*")))
    output = folder / f"output-{number:03d}.txt"
    # Process groups of earlier tests may be garbage here; collected in a fork, which lacks their
    # threads, they would crash it.
    gc.disable()
    pid = os.fork()
    if pid:
        gc.enable()
        return Command(pid, output)
    gc.freeze()
    gc.enable()
    code = 1
    try:
        os.setsid()
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # They stay open as long as the process, so no context manager closes them.
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["ndtrain", *arguments]
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def train(recipe: Path, *options: str) -> Command:
    return start(recipe.parent, "train", str(recipe), *options)


Moment = Callable[[RunStatus], bool]


def when(run: Path, command: Command, moment: Moment, seconds: float = 120) -> bool:
    """Wait until `status.json` of this start shows the moment; False when it ended before."""
    deadline = time.monotonic() + seconds
    while command.poll() is None:
        assert time.monotonic() < deadline, f"the moment did not come:\n{command.text()}"
        status = read_status(run / "status.json")
        if status is not None and status.pid in command.ranks() and moment(status):
            return True
        time.sleep(0.001)
    return False


def when_file(path: Path, process: "subprocess.Popen[bytes]", seconds: float = 180) -> None:
    """Wait until a file appears while `process` runs."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, f"ended with {process.returncode} before {path.name}"
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


@dataclass(frozen=True)
class Trace:
    """Everything about a finished run that must not depend on how often it was disturbed."""

    losses: dict[int, str]
    norms: dict[int, str]
    evals: dict[int, str]
    tokens: dict[int, int]
    weights: str


def read_trace(run: Path) -> Trace:
    """The trace of a run; steps that were taken twice must have come out the same."""
    trace = Trace({}, {}, {}, {}, weights_digest(run / "export"))
    for line in (run / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            _note(trace.losses, event["step"], repr(event["loss"]))
            _note(trace.norms, event["step"], repr(event["grad_norm"]))
            _note(trace.tokens, event["step"], event["seen_tokens"])
        elif event["event"] == "eval":
            _note(trace.evals, event["step"], repr(event["loss"]))
    return trace


def _note(known: dict[int, object], step: int, value: object) -> None:
    assert known.setdefault(step, value) == value, f"step {step}: {known[step]} and {value}"


def weights_digest(export: Path) -> str:
    names = sorted(export.glob("*.safetensors"))
    assert names, f"no weights in {export}"
    return sha256(b"".join(path.read_bytes() for path in names)).hexdigest()


def starts(run: Path) -> Iterator[int]:
    """Steps from which each start of this run went on."""
    for line in (run / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "start":
            yield event["start_step"]


def checkpoint_state(run: Path) -> tuple[list[int], list[str]]:
    """Steps of the whole checkpoints, and the names of those that are not."""
    whole, broken = [], []
    for path in sorted((run / "checkpoints").glob("step-*")):
        reason = files.damage(path)
        if reason is None:
            whole.append(files.step_of(path) or 0)
        else:
            broken.append(f"{path.name}: {reason}")
    return whole, broken


def alive(pids: list[int]) -> list[int]:
    """Which of these processes still run (and are no zombies)."""
    running = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            continue
        if state not in "ZX":
            running.append(pid)
    return running
