"""Saving and loading in one process: exactness, failures, rotation, safety."""

import io
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ndtrain.errors import CheckpointError
from ndtrain.parallel import runtime as runtimes
from ndtrain.parallel.runtime import Runtime
from ndtrain.train import checkpoint_store as store
from ndtrain.train.checkpoint import Checkpointer, find_checkpoint
from ndtrain.train.checkpoint_state import create_optimizer_states, model_tensors
from ndtrain.train.state import Progress


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    runtime = runtimes.start(None, device="cpu", timeout_seconds=30)
    yield runtime
    runtimes.stop(runtime)


class Net(nn.Module):
    """Two layers with a tied weight and one buffer of each kind."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, 4)
        self.tied = nn.Linear(4, width)
        self.tied.weight = self.first.weight
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("derived", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.first(x) + self.tied(x)))
        return out


def build(seed: int, width: int = 6) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net(width)
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    # Drawn from the global generator too, as dropout would.
    noise = torch.rand(8, 4)
    loss = (net(torch.randn(8, 4, generator=generator)) - noise).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def open_checkpointer(folder: Path, runtime: Runtime, **keys: object) -> Checkpointer:
    return Checkpointer(folder, runtime=runtime, run_id="run", **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("stop_at", [1, 3, 5])
def test_stopping_anywhere_changes_no_later_loss(
    tmp_path: Path, runtime: Runtime, asynchronous: bool, stop_at: int
) -> None:
    net, optimizer = build(seed=1)
    keeper = open_checkpointer(tmp_path, runtime, asynchronous=asynchronous)
    losses = []
    for number in range(6):
        losses.append(step(net, optimizer, number))
        if number + 1 == stop_at:
            progress = Progress(step=stop_at, position=8 * stop_at, best_loss=0.5)
            keeper.save(stop_at, net, optimizer, progress, {"note": "x"})
    keeper.close()

    net, optimizer = build(seed=99)
    keeper = open_checkpointer(tmp_path, runtime)
    found = keeper.newest()
    assert found is not None
    assert found.meta["extra"] == {"note": "x"}
    restored = keeper.load(found, net, optimizer)
    assert restored == Progress(step=stop_at, position=8 * stop_at, best_loss=0.5)
    assert [step(net, optimizer, number) for number in range(stop_at, 6)] == losses[stop_at:]
    keeper.close()


def test_the_copy_is_of_the_moment_of_the_save(tmp_path: Path, runtime: Runtime) -> None:
    net, optimizer = build(seed=1)
    step(net, optimizer, 0)
    expected = {name: tensor.to_local().clone() for name, tensor in net.named_parameters()}
    keeper = open_checkpointer(tmp_path, runtime)
    for number in range(1, 5):
        keeper.save(number, net, optimizer, Progress(number))
        if number == 1:
            keeper.wait()
            first = find_checkpoint(tmp_path / "checkpoints/step-000001")
        step(net, optimizer, number)
    keeper.close()
    other, _ = build(seed=2)
    keeper = open_checkpointer(tmp_path, runtime)
    keeper.load(first, other)
    for name, tensor in other.named_parameters():
        assert torch.equal(tensor.to_local(), expected[name])
    keeper.close()


def test_saves_are_reported_once_with_their_times(tmp_path: Path, runtime: Runtime) -> None:
    net, optimizer = build(seed=1)
    keeper = open_checkpointer(tmp_path, runtime)
    assert keeper.poll() == []
    keeper.save(1, net, optimizer, Progress(1))
    keeper.save(2, net, optimizer, Progress(2))
    keeper.wait()
    saved = keeper.poll()
    assert [one.step for one in saved] == [1, 2]
    assert all(one.path.is_dir() and one.blocked_seconds > 0 for one in saved)
    assert keeper.poll() == []
    keeper.close()


def test_limit_keeps_newest_and_best(tmp_path: Path, runtime: Runtime) -> None:
    net, optimizer = build(seed=1)
    keeper = open_checkpointer(tmp_path, runtime, limit=2)
    for number in range(1, 6):
        keeper.save(number, net, optimizer, Progress(number, best_step=1))
    keeper.close()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000001", "step-000004", "step-000005"]


def test_a_failed_background_save_is_an_error_and_harms_nothing(
    tmp_path: Path, runtime: Runtime
) -> None:
    net, optimizer = build(seed=1)
    keeper = open_checkpointer(tmp_path, runtime)
    keeper.save(1, net, optimizer, Progress(1))
    keeper.wait()
    # A file where the unfinished folder must go: it can be neither removed as one nor made.
    (tmp_path / "checkpoints/.unfinished-step-000002").write_text("in the way")
    keeper.save(2, net, optimizer, Progress(2))
    with pytest.raises(CheckpointError, match="File exists"):
        keeper.wait()
    found = keeper.newest()
    assert found is not None
    assert found.step == 1
    keeper.close()


def test_another_model_is_refused_by_name(tmp_path: Path, runtime: Runtime) -> None:
    net, optimizer = build(seed=1)
    keeper = open_checkpointer(tmp_path, runtime)
    keeper.save(1, net, optimizer, Progress(1))
    keeper.wait()
    wide, its_optimizer = build(seed=1, width=8)
    found = keeper.newest()
    assert found is not None
    with pytest.raises(CheckpointError, match=r"first\.weight is \(6, 4\) in it and \(8, 4\)"):
        keeper.load(found, wide, its_optimizer)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(CheckpointError, match=r"it has no optimizer.*momentum_buffer"):
        keeper.load(found, net, sgd)
    keeper.close()


def test_frozen_parameters_stay_out_when_only_trained_ones_are_kept(
    tmp_path: Path, runtime: Runtime
) -> None:
    net, _ = build(seed=1)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("second" in name)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    step(net, optimizer, 0)
    keeper = open_checkpointer(tmp_path, runtime, trained_only=True)
    keeper.save(1, net, optimizer, Progress(1))
    keeper.wait()
    stored = store.shapes(tmp_path / "checkpoints/step-000001")
    model_names = {name for name in stored if name.startswith("model.")}
    assert model_names == {"model.second.weight", "model.second.bias"}
    keeper.close()


def test_tied_weights_and_derived_buffers_are_not_stored_twice(runtime: Runtime) -> None:
    names = set(model_tensors(build(seed=1)[0], trained_only=False))
    assert "model.kept" in names
    assert not names & {"model.derived", "model.tied.weight"}


def test_making_optimizer_states_moves_no_parameter(runtime: Runtime) -> None:
    net, optimizer = build(seed=1)
    before = {name: tensor.to_local().clone() for name, tensor in net.named_parameters()}
    create_optimizer_states(optimizer)
    for name, tensor in net.named_parameters():
        assert torch.equal(tensor.to_local(), before[name])
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert len(optimizer.state) == 5


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_an_index_cannot_run_code(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "made")))
    with pytest.raises(CheckpointError, match="has no place in a checkpoint's index"):
        store.read_index(tmp_path)
    assert not (tmp_path / "made").exists()


class ByAttribute:
    """Pickled as an attribute of something, as early releases of Python 3.11 pickle enums."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (self.owner, self.name)


def test_an_index_may_hold_members_of_its_enum_by_name(tmp_path: Path) -> None:
    kind = store._IndexUnpickler(
        io.BytesIO(pickle.dumps(ByAttribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")))
    )
    assert kind.load() is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    for owner, name in ((_MEM_FORMAT_ENCODING, "__class__"), (Metadata, "__init__")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(ByAttribute(owner, name)))
        with pytest.raises(CheckpointError, match=f"'{name}' is no member of an enum"):
            store.read_index(tmp_path)


def test_an_unwritable_run_directory_fails_before_training(
    tmp_path: Path, runtime: Runtime
) -> None:
    (tmp_path / "checkpoints").write_text("a file in its place")
    with pytest.raises(CheckpointError, match="Checkpoints cannot be written"):
        open_checkpointer(tmp_path, runtime)


def test_space_is_checked_before_the_first_step(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = build(seed=1)
    keeper = open_checkpointer(tmp_path, runtime)
    keeper.check_space(net, optimizer)
    full = os.statvfs_result((4096, 4096, 100, 10, 10, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(CheckpointError, match=r"needs 1\.0 MiB, but only 0\.0 MiB are free"):
        keeper.check_space(net, optimizer)
    keeper.close()


def test_no_thread_is_left_behind(tmp_path: Path, runtime: Runtime) -> None:
    before = threading.active_count()
    net, optimizer = build(seed=1)
    keeper = open_checkpointer(tmp_path, runtime)
    keeper.save(1, net, optimizer, Progress(1))
    keeper.close()
    assert threading.active_count() == before
