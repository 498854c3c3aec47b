"""What precision does to a run: small updates are kept, a broken number stops it."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.checkpoint import checkpoint
from warm_commands import warm_program

from ndtrain.environment import LaunchedRank
from ndtrain.parallel.mesh import build_mesh
from ndtrain.parallel.runtime import start, stop
from ndtrain.plan.model_source import find_model
from ndtrain.plan.plan import ParallelPlan
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import Engine, assemble

Train = Callable[..., subprocess.CompletedProcess[str]]

ROWS = [{"text": f"row {number}: " + "words and more words " * 3} for number in range(24)]
SIZES: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

TOO_FAST: dict[str, Any] = {"learning_rate": 1e30, "lr_scheduler": "constant"}
"""The first step is sound and throws the weights so far that the second overflows."""


def write_recipe(folder: Path, **keys: Any) -> Path:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    recipe = {
        "model_config": SIZES,
        "tokenizer_config": "bytes",
        "datasets": [{"path": str(rows), "type": "completion"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "sequence_len": 96,
        "learning_rate": 1e-3,
        "max_steps": 3,
        "device": "cpu",
        "output_dir": str(folder / "run"),
        **keys,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`ndtrain`, whose imports are paid once."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with warm_program(tmp_path_factory.mktemp("bin"), {}, environ) as folder:
        yield folder / "ndtrain"


@pytest.fixture
def train(program: Path) -> Train:
    """A run in a process of its own."""

    def run(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
        command = [str(program), "train", str(path), *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


def events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@contextmanager
def assembled(**keys: Any) -> Iterator[Engine]:
    """The engine of a tiny recipe, on this process alone."""
    recipe = Recipe.model_validate(
        {
            "model_config": {**SIZES, "vocab_size": 64},
            "tokenizer_config": "bytes",
            "device": "cpu",
            **keys,
        }
    )
    launched: LaunchedRank | None = None
    runtime = start(launched, device="cpu")
    try:
        yield assemble(recipe, find_model(recipe), build_mesh(ParallelPlan(), runtime.device))
    finally:
        stop(runtime)


def moved_norms(param_dtype: str, rate: float, **keys: Any) -> list[torch.Tensor]:
    """How far one step moves each weight of each norm away from 1."""
    bf16 = {"bf16": True, "param_dtype": param_dtype}
    with assembled(learning_rate=rate, **bf16, **keys) as engine:
        for parameter in engine.parameters:
            parameter.grad = torch.ones_like(parameter)
        engine.optimizer.step()
        norms = [p for name, p in engine.model.named_parameters() if "norm" in name]
        return [(norm.full_tensor().detach().float() - 1).abs() for norm in norms]


@pytest.mark.parametrize("policy", ["attention", "full"])
def test_blocks_that_cannot_be_compiled_recompute_all_the_same(policy: str) -> None:
    """Experts too narrow for the grouped product take other tokens at each step."""
    sizes = {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 30}
    keys = {"torch_compile": True, "gradient_checkpointing": policy}
    with assembled(
        model_config={**SIZES, **sizes, "vocab_size": 64}, **keys, learning_rate=1.0
    ) as engine:
        for block in engine.causal_lm.base_model.layers:
            assert block.forward.func is checkpoint


def test_a_small_learning_rate_moves_norms_that_are_stored_in_fp32() -> None:
    moved = [norm.max().item() for norm in moved_norms("fp32", 1e-6)]
    assert moved == pytest.approx([1e-6] * len(moved), rel=0.2)


def test_stored_in_bf16_a_step_below_its_spacing_is_rounded_by_chance() -> None:
    """Below 1, bf16 numbers are 2^-8 apart: a quarter of the weights takes a whole such step."""
    moved = torch.cat(moved_norms("bf16", 2**-10))
    assert set(moved.tolist()) == {0.0, 2**-8}
    assert moved.mean().item() == pytest.approx(2**-10, rel=0.25)
    description = str(Recipe.model_fields["param_dtype"].description)
    assert "AdamW then rounds its updates by chance" in description


def test_other_optimizers_lose_it_as_the_recipe_key_says() -> None:
    lost = moved_norms("bf16", 2**-10, optimizer="sgd")
    assert max(norm.max().item() for norm in lost) == 0.0
    assert "other optimizers lose them" in str(Recipe.model_fields["param_dtype"].description)


def test_the_dtypes_of_a_run_are_said_at_its_start(tmp_path: Path, train: Train) -> None:
    done = train(write_recipe(tmp_path, bf16=True))
    assert done.returncode == 0, done.stderr
    assert "precision is fp32, except computation bf16" in done.stdout


def test_a_step_that_is_not_finite_and_partly_done_says_so(tmp_path: Path, train: Train) -> None:
    early = {"optimizer_in_backward": True, "max_grad_norm": None}
    done = train(write_recipe(tmp_path, **TOO_FAST, **early))
    assert done.returncode == 7, done.stdout + done.stderr
    assert "continue from the last checkpoint" in done.stderr
    assert "seen on ranks [0]" in done.stderr


def test_half_precision_without_a_scaler_is_refused(tmp_path: Path, train: Train) -> None:
    done = train(write_recipe(tmp_path, fp16=True))
    assert done.returncode == 2
    assert "use bf16: auto" in done.stderr


def test_a_loss_that_is_not_finite_ends_the_run_before_the_weights_change(
    tmp_path: Path, train: Train
) -> None:
    done = train(write_recipe(tmp_path, **TOO_FAST))
    assert done.returncode == 7, done.stdout + done.stderr
    assert "step 2 has" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    (left,) = (tmp_path / "run").glob("diverged-step-2.rank-0.json")
    assert json.loads(left.read_text(encoding="utf-8"))[0]["input_ids"]
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    status = json.loads((tmp_path / "run" / "status.json").read_text(encoding="utf-8"))
    assert (status["state"], status["exit_code"]) == ("failed", 7)


@pytest.mark.slow
def test_a_stopped_run_with_every_memory_tool_goes_on_bit_for_bit(
    tmp_path: Path, train: Train
) -> None:
    keys = {
        "model_config": {**SIZES, "hidden_size": 128, "intermediate_size": 256},
        "param_dtype": "bf16",
        "optimizer_state_dtype": "8bit",
        "optimizer_in_backward": True,
        "max_grad_norm": None,
        "gradient_checkpointing": True,
        "activation_offloading": True,
        "max_steps": 4,
        "export": False,
    }
    found = {}
    for name, starts in (("whole", [()]), ("stopped", [("--max-steps", "2"), ()])):
        folder = tmp_path / name
        folder.mkdir()
        path = write_recipe(folder, **keys)
        for options in starts:
            done = train(path, *options)
            assert done.returncode == 0, done.stdout + done.stderr
        steps = [event for event in events(folder) if event["event"] == "step"]
        assert [event["step"] for event in steps] == [1, 2, 3, 4]
        found[name] = [(event["loss"], event["grad_norm"]) for event in steps]
    assert found["stopped"] == found["whole"]
    assert len(set(found["whole"])) == 4


def test_some_steps_that_are_not_finite_may_be_left_out(tmp_path: Path, train: Train) -> None:
    done = train(write_recipe(tmp_path, **TOO_FAST, skip_nonfinite=5, export=False))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [event["step"] for event in events(tmp_path) if event["event"] == "step"] == [1, 2, 3]
