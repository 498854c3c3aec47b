"""A run directory takes one run at a time, and forgets a run that was killed."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from ndtrain import cli
from ndtrain.errors import CheckpointError
from ndtrain.report.run_lock import LOCK_FILE, hold_folder
from ndtrain.train import command

HOLDER = """\
import os, sys, time
from pathlib import Path
from ndtrain.report.run_lock import hold_folder
with hold_folder(Path(sys.argv[1])):
    if os.fork():
        print("held", flush=True)
    time.sleep(60)
"""
RECIPE = """\
model_config: {model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
  num_key_value_heads: 2, intermediate_size: 32, vocab_size: 300}
tokenizer_config: bytes
datasets: [{path: synthetic}]
device: cpu
learning_rate: 1e-3
output_dir: run
"""


def test_a_second_run_is_kept_out_until_the_first_has_left(tmp_path: Path) -> None:
    with hold_folder(tmp_path):
        with pytest.raises(CheckpointError) as raised, hold_folder(tmp_path, patience=0.2):
            pass
        assert str(raised.value) == (
            f"{tmp_path}: another run is writing into it. "
            "Wait for it, stop it, or set another output_dir."
        )
    with hold_folder(tmp_path, patience=0):
        pass


def test_a_killed_parent_holds_on_through_its_ranks_and_no_longer(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    holder.kill()
    holder.wait()
    with pytest.raises(CheckpointError), hold_folder(tmp_path, patience=0):
        pass
    os.killpg(holder.pid, signal.SIGKILL)
    began = time.monotonic()
    with hold_folder(tmp_path):
        assert time.monotonic() - began < 10


def test_a_folder_without_rights_is_one_message(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"), hold_folder(tmp_path):
        pass


@pytest.mark.parametrize("options", [[], ["--restart"]])
def test_train_leaves_a_directory_alone_in_which_another_run_writes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "hold_folder", partial(hold_folder, patience=0.2))
    Path("recipe.yaml").write_text(RECIPE)
    Path("run").mkdir()
    with hold_folder(Path("run")):
        assert cli.run(["train", "recipe.yaml", *options]) == 5
    assert capsys.readouterr().err.startswith("run: another run is writing into it.")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["run"]
    assert not Path("run/metrics.jsonl").exists()
