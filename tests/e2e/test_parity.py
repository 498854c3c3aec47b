"""`ndtrain parity`: a recipe's mesh against one process, and an engine that is wrong."""

import dataclasses
import json
from pathlib import Path

import pytest
from _pytest.capture import CaptureFixture

from ndtrain.cli import run
from ndtrain.data.prepare import prepare
from ndtrain.environment import LaunchedRank
from ndtrain.launch import LaunchOptions, launch
from ndtrain.model.byte_tokenizer import build_byte_tokenizer
from ndtrain.parallel.mesh import build_mesh
from ndtrain.parallel.runtime import start, stop
from ndtrain.plan.decide import decide
from ndtrain.plan.model_source import find_model
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import assemble
from ndtrain.train.cells import Cell, CellsJob, Meshes, run_cell, save_trace, trace_steps
from ndtrain.train.compare import LossReport, compare_traces

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 150,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 333,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [{"instruction": f"Say {n}.", "output": f"{n} " * (n % 7 + 1)} for n in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_recipe(folder: Path, rows: Path, **keys: object) -> Path:
    values = {
        "model_config": MODEL,
        "tokenizer_config": "bytes",
        "datasets": [{"path": str(rows), "type": "alpaca"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "sequence_len": 256,
        "sample_packing": True,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-5,
        "device": "cpu",
        **keys,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(values))
    return path


def test_a_mesh_of_four_ranks_computes_what_one_process_does(
    rows: Path, tmp_path: Path, capfd: CaptureFixture[str]
) -> None:
    recipe = write_recipe(
        tmp_path,
        rows,
        dp_shard_size=2,
        tensor_parallel_size=2,
        adapter="lora",
        lora_r=4,
        lora_dropout=0.1,
        lora_target_linear=True,
    )
    code = run(["parity", str(recipe), "--steps", "2"])
    said = capfd.readouterr().out
    assert code == 0
    assert "qwen3 shrunk to 2 layers, 4 query and 2 key/value heads, vocabulary 269" in said
    assert "4 packed rows a step" in said
    assert "verdict: the same" in said


def test_one_process_has_nothing_to_be_compared_with(
    rows: Path, tmp_path: Path, capfd: CaptureFixture[str]
) -> None:
    assert run(["parity", str(write_recipe(tmp_path, rows))]) == 0
    assert "nothing to compare" in capfd.readouterr().out


WIDE = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 333,
}


@pytest.mark.parametrize("kind", [True, "rowwise"])
def test_8_bit_matmuls_are_held_to_bf16(
    rows: Path, tmp_path: Path, capfd: CaptureFixture[str], kind: bool | str
) -> None:
    """The model is never built at its size: both runs are of the shrunk one."""
    recipe = write_recipe(tmp_path, rows, model_config=WIDE, fp8=kind)
    assert run(["parity", str(recipe), "--steps", "8"]) == 0
    said = capfd.readouterr().out
    assert f"fp8    {'tensorwise' if kind is True else kind}, against bf16, 1 process on" in said
    assert "random weights, bf16" in said
    lines = said.splitlines()
    first = next(number for number, line in enumerate(lines) if "loss, bf16" in line)
    differences = [float(line.split()[-1]) for line in lines[first + 1 : first + 9]]
    assert 0 < max(differences) <= 1e-2
    assert "allowed 1e-02: within it" in lines[-1]


def test_losses_that_leave_bf16_do_not_pass() -> None:
    assert LossReport(((2.0, 2.01), (1.99, 2.0))).passes
    assert not LossReport(((2.0, 2.0), (2.1, 2.0))).passes
    broken = LossReport(((2.0, 2.0), (float("nan"), 2.0), (2.0, 2.0)))
    assert not broken.passes
    assert "beyond it" in broken.table()


def run_broken(job: CellsJob, launched: LaunchedRank | None) -> int:
    """The first cell as it is; the second by an engine that forgets to sum gradients over tp."""
    runtime = start(launched, device="cpu")
    for number, cell in enumerate(job.cells):
        if number == 0:
            trace = run_cell(cell, Meshes(runtime.device))
        else:
            mesh = build_mesh(cell.plan.parallel, runtime.device)
            engine = assemble(cell.recipe, cell.source, mesh)
            trace = trace_steps(cell, dataclasses.replace(engine, partial=()))
        if runtime.is_main:
            save_trace(trace, job.folder, number)
    stop(runtime)
    return 0


def test_an_engine_that_forgets_a_gradient_is_found_out(rows: Path, tmp_path: Path) -> None:
    path = write_recipe(tmp_path, rows, tensor_parallel_size=2)
    recipe = Recipe.model_validate(json.loads(path.read_text()))
    prepared = prepare(recipe, build_byte_tokenizer(), "bytes").path
    cell = Cell(recipe, find_model(recipe), decide(recipe, None), prepared, 2)
    (tmp_path / "logs").mkdir()
    job = CellsJob((cell, cell), tmp_path)
    options = LaunchOptions(world_size=2, run_dir=tmp_path, device="cpu")
    assert launch(job, run_broken, options) == 0
    differences = compare_traces(job.trace(1), job.trace(0)).differences
    assert any(text.startswith("gradient norm of step 1") for text in differences)
