"""A model split over several processes answers as one process does: same logits, same words."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from test_load_weights import CONFIGS, random_recipe

from ndtrain.cli import run
from ndtrain.errors import MeshError
from ndtrain.model.adapters import apply_adapter
from ndtrain.model.build import build_model
from ndtrain.model.byte_tokenizer import build_byte_tokenizer
from ndtrain.model.generate import Sampling, answer
from ndtrain.model.weights import load_weights
from ndtrain.parallel.mesh import build_mesh
from ndtrain.parallel.runtime import Runtime
from ndtrain.plan.model_source import find_model
from ndtrain.plan.plan import ParallelPlan
from ndtrain.recipe.schema import Recipe
from ndtrain.train.export import export_adapter, export_model
from ndtrain.train.speaker import FoundSpeaker, Place, find_speaker, load_speaker

CPU = torch.device("cpu")
IDS = torch.arange(24)[None]
USER = [{"role": "user", "content": "Hi"}]
ADAPTED: dict[str, Any] = {
    "adapter": "lora",
    "lora_r": 3,
    "lora_target_modules": ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj", "lm_head"),
    "lora_modules_to_save": ("norm",),
}


def base_folder(folder: Path, name: str) -> Path:
    """A random model whose answers are far from uniform, with the byte tokenizer."""
    config = {**CONFIGS[name], "vocab_size": 321, "initializer_range": 0.3}
    recipe = random_recipe(config)
    model = build_model(find_model(recipe), recipe)
    load_weights(model, find_model(recipe), seed=3, device=CPU)
    export_model(
        model, build_byte_tokenizer(), find_model(recipe), folder, runtime=Runtime(0, 1, 0, CPU)
    )
    return folder


def adapter_folder(folder: Path, base: Path, **keys: Any) -> Path:
    recipe = Recipe(base_model=str(base), learning_rate=1.0, **ADAPTED, **keys)
    model = apply_adapter(build_model(find_model(recipe), recipe), recipe)
    load_weights(model, find_model(recipe), seed=5, device=CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator()) * 0.1)
    runtime = Runtime(0, 1, 0, CPU)
    export_adapter(model, None, find_model(recipe), folder, runtime=runtime)
    return folder


def said(found: FoundSpeaker, place: Place) -> tuple[torch.Tensor, str, str]:
    """Logits of a row, a greedy answer and a sampled one."""
    speaker = load_speaker(found, place)
    with torch.no_grad():
        logits = speaker.model(input_ids=IDS).logits
    greedy, sampled = (
        answer(speaker.model, speaker.tokenizer, USER, sampling)
        for sampling in (Sampling(24), Sampling(24, temperature=1.0, top_p=0.9, seed=7))
    )
    return logits, greedy, sampled


def said_on_a_mesh(_: int, found: FoundSpeaker, tp: int) -> tuple[torch.Tensor, str, str]:
    mesh = build_mesh(ParallelPlan(tp=tp), CPU)
    return said(found, Place(CPU, torch.float32, mesh.tp))


def assert_same_words(found: FoundSpeaker, tp: int, folder: Path) -> None:
    logits, greedy, sampled = said(found, Place(CPU, torch.float32))
    assert greedy != sampled
    for own, *words in run_forked(tp, folder, said_on_a_mesh, found, tp):
        assert torch.allclose(own, logits, atol=1e-5 * float(logits.std()), rtol=1e-5)
        assert words == [greedy, sampled]


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("llama", 2),
        ("qwen3 tied", 2),
        ("qwen3_moe", 2),
        # two key/value heads: each rank keeps them whole and takes one
        ("llama", 4),
    ],
)
def test_a_split_base_answers_the_same(name: str, tp: int, tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", name)
    assert_same_words(find_speaker(str(base)), tp, tmp_path)


@pytest.mark.parametrize("keys", [{}, {"peft_use_dora": True}], ids=["lora", "dora"])
def test_a_split_adapter_answers_the_same(keys: dict[str, Any], tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "qwen3 tied")
    adapter = adapter_folder(tmp_path / "adapter", base, **keys)
    assert_same_words(find_speaker(str(adapter)), 2, tmp_path)


def test_what_cannot_be_split(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "llama")
    found = find_speaker(str(base))
    said_by_ranks = run_forked(3, tmp_path, refusal, found)
    assert all("is 3, but the model has 4 query heads" in said for said in said_by_ranks)


def refusal(_: int, found: FoundSpeaker) -> str:
    try:
        said_on_a_mesh(0, found, 3)
    except MeshError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_conversation_over_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts, then turns from a pipe that only the main rank reads."""
    base = base_folder(tmp_path / "base", "llama")
    words = ["generate", str(base), "--prompt", "Hello", "--max-new-tokens", "6", "--chat"]
    typed = "Hi\n\nAnd now?\n/exit\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert run(words) == 0
    alone = capsys.readouterr().out
    assert alone.count("\n") >= 3
    done = subprocess.run(
        [sys.executable, "-m", "ndtrain", *words, "--tensor-parallel-size", "2"],
        input=typed,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone
