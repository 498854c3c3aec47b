"""From a recipe to a model that others load: train, export, merge and generate by real commands."""

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ndtrain.cli import run

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "examples" / "data" / "parallelism-faq-heldout.jsonl"
RECIPE = f"""\
tokenizer_config: bytes
datasets: [{{path: {ROWS}}}]
sequence_len: 256
micro_batch_size: 1
global_batch_size: 2
learning_rate: 1e-3
max_steps: 2
device: cpu
"""
RANDOM = """\
model_config:
  {model_type: qwen3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, head_dim: 8,
   num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: true}
"""
IDS = torch.arange(24)[None]


def train(recipe: Path) -> str:
    """A run in a process of its own; what it printed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), "train", str(recipe)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ndtrain(*arguments: object, code: int = 0) -> str:
    """One command in this process, as the console script runs it; what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        left = run([str(one) for one in arguments])
    assert left == code, out.getvalue() + err.getvalue()
    return out.getvalue() if code == 0 else err.getvalue()


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model, trained on two ranks."""
    folder = tmp_path_factory.mktemp("full")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE + RANDOM + f"dp_shard_size: 2\noutput_dir: {folder / 'run'}\n")
    out = train(recipe)
    assert "The export was reloaded: its logits" in out
    return folder / "run"


@pytest.fixture(scope="module")
def adapter_run(full_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on that model, trained with split matrices; its learning rate is large."""
    folder = tmp_path_factory.mktemp("adapter")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        RECIPE.replace("1e-3", "1e-2").replace("tokenizer_config: bytes\n", "")
        + f"base_model: {full_run / 'export'}\nadapter: lora\nlora_r: 4\n"
        + "lora_target_linear: true\nlora_modules_to_save: [norm]\ntensor_parallel_size: 2\n"
        + "gradient_checkpointing: true\n"
        + f"output_dir: {folder / 'run'}\n"
    )
    assert "The export was reloaded: its logits" in train(recipe)
    return folder / "run"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def test_a_checkpoint_exports_what_the_run_left(full_run: Path, tmp_path: Path) -> None:
    out = ndtrain("export", full_run, tmp_path / "fp32", "--dtype", "fp32")
    assert "Wrote the model of step 2" in out
    names = {file.name for file in (full_run / "export").iterdir()}
    assert names == {file.name for file in (tmp_path / "fp32").iterdir()}
    for name in sorted(names):
        left, made = full_run / "export" / name, tmp_path / "fp32" / name
        assert left.read_bytes() == made.read_bytes(), name
    ndtrain("export", full_run / "checkpoints" / "step-000002", tmp_path / "bf16")
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32")
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="auto")
    assert rounded.dtype == torch.bfloat16
    for name, parameter in exact.named_parameters():
        assert torch.equal(parameter.to(torch.bfloat16), rounded.get_parameter(name)), name


def test_the_export_is_complete(full_run: Path) -> None:
    export = full_run / "export"
    config = json.loads((export / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(export / "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(export)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"
    assert (export / "README.md").read_text().startswith("---\n")


def test_adapter_merge_and_base_agree(adapter_run: Path, full_run: Path, tmp_path: Path) -> None:
    stored = load_file(adapter_run / "export" / "adapter_model.safetensors")
    assert not any("wrapped" in key or "orig_mod" in key for key in stored)
    out = ndtrain("merge", adapter_run, tmp_path / "merged")
    assert "stored as float32; largest rounding error 0 in" in out
    base = AutoModelForCausalLM.from_pretrained(full_run / "export")
    plain = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, adapter_run / "export"))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert not torch.allclose(adapted, plain, atol=1e-3)
    assert torch.allclose(adapted, merged, atol=1e-5)
    # the same from the checkpoint alone
    copied = tmp_path / "run"
    shutil.copytree(adapter_run, copied, ignore=shutil.ignore_patterns("export"))
    ndtrain("merge-lora", copied, tmp_path / "again")
    one, other = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "merged", tmp_path / "again")
    )
    assert all(torch.equal(one[name], other[name]) for name in one | other)


def test_every_kind_of_model_answers(adapter_run: Path, full_run: Path, tmp_path: Path) -> None:
    """Byte by byte the same from a run, its export, its checkpoint and a merged adapter."""
    copied = tmp_path / "run"
    shutil.copytree(full_run, copied, ignore=shutil.ignore_patterns("export"))
    ndtrain("merge", adapter_run, tmp_path / "merged")
    options = ("--prompt", "Hello", "--max-new-tokens", 12)
    whole = [
        ndtrain("generate", model, *options)
        for model in (full_run, full_run / "export", copied, copied / "checkpoints" / "step-000002")
    ]
    assert len(set(whole)) == 1
    adapters = [
        ndtrain("generate", model, *options)
        for model in (adapter_run, adapter_run / "export", tmp_path / "merged")
    ]
    assert len(set(adapters)) == 1
    assert adapters[0] != whole[0]


@pytest.mark.slow
def test_an_adapter_on_random_weights_answers_through_its_run_alone(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    folder = tmp_path / "run"
    adapter = "adapter: lora\nlora_target_linear: true\n"
    recipe.write_text(RECIPE + RANDOM + adapter + f"output_dir: {folder}\n")
    assert f'next   ndtrain generate {folder} --prompt "..."' in train(recipe)
    words = ("--prompt", "Hi", "--max-new-tokens", 3)
    answer = ndtrain("generate", folder, *words)
    assert answer == ndtrain("generate", folder / "checkpoints" / "step-000002", *words)
    again = ndtrain("export", folder, tmp_path / "again")
    assert again.endswith(f'Next: ndtrain generate {folder} --prompt "..."\n')
    said = ndtrain("generate", tmp_path / "again", *words, code=3)
    assert "one with random weights is stored nowhere. Name the run itself" in said
    said = ndtrain("merge", folder, tmp_path / "merged", code=3)
    assert said.startswith(f"{folder}: the base has random weights that are stored nowhere.")


def test_prompts_from_a_file_and_a_conversation(
    full_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("First question\n\nSecond question\n")
    options = ("--max-new-tokens", 4)
    out = ndtrain("generate", full_run, "--prompts", lines, *options)
    assert out.startswith("> First question\n")
    assert "\n> Second question\n" in out
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\nAnd now?\n/exit\nno\n"))
    talk = ndtrain("generate", full_run, "--chat", *options)
    assert "> " not in talk
    assert sys.stdin.read() == "no\n"


def test_sampling_depends_on_the_seed_alone(full_run: Path) -> None:
    options = ("--prompt", "Hello", "--max-new-tokens", 24, "--temperature", 1.5, "--seed")
    first, again, other = (ndtrain("generate", full_run, *options, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.slow
def test_an_adapter_from_the_hub_answers_or_says_that_the_hub_is_off(
    adapter_run: Path, tmp_path: Path
) -> None:
    """From the local cache of the hub, as a download leaves it."""
    repository = tmp_path / "hub" / "models--some--adapter"
    shutil.copytree(adapter_run / "export", repository / "snapshots" / "c0ffee")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    options = ("--prompt", "Hello", "--max-new-tokens", "12")
    said = [
        subprocess.run(
            [sys.executable, "-m", "ndtrain", "generate", model, *options],
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")},
            check=False,
        )
        for model in ("some/adapter", "other/adapter")
    ]
    assert [done.returncode for done in said] == [0, 3], said[0].stderr
    assert said[0].stdout == ndtrain("generate", adapter_run / "export", *options)
    assert "not in the local hub cache, and the hub is switched off" in said[1].stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("generate", "RUN"), 2, "there is nothing to answer"),
        (("generate", "/no/such/model", "--prompt", "x"), 3, "'/no/such/model' does not exist"),
        (("generate", "RUN", "--prompts", "/no/file"), 2, "the prompts cannot be read"),
        (("export", "/no/such/run", "OUT"), 5, "is not a run directory"),
        (("export", "RUN", "OUT", "--dtype", "int8"), 2, "'int8' is not a dtype"),
        (("merge", "RUN", "OUT"), 3, "there is no adapter to merge"),
    ],
)
def test_mistakes_give_one_line_and_their_code(
    arguments: tuple[str, ...], code: int, message: str, full_run: Path, tmp_path: Path
) -> None:
    places = {"RUN": full_run, "OUT": tmp_path / "out"}
    said = ndtrain(*(places.get(one, one) for one in arguments), code=code)
    assert message in said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_keeps_what_was_there(
    full_run: Path, tmp_path: Path
) -> None:
    dest = tmp_path / "file" / "out"
    dest.parent.write_text("a file, not a folder")
    said = ndtrain("export", full_run, dest, code=5)
    assert str(dest.parent) in said
    assert dest.parent.read_text() == "a file, not a folder"


def test_a_damaged_export_is_noticed_by_the_reload_check(full_run: Path, tmp_path: Path) -> None:
    """The check compares logits: one changed matrix moves them beyond what it allows."""
    shutil.copytree(full_run / "export", tmp_path / "damaged")
    file = tmp_path / "damaged" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"] *= -1
    save_file(tensors, file, {"format": "pt"})
    whole, damaged = (
        logits(AutoModelForCausalLM.from_pretrained(folder))
        for folder in (full_run / "export", tmp_path / "damaged")
    )
    assert (whole - damaged).norm() / (whole - whole.mean()).norm() > 1e-3
