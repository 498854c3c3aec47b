"""What leaves a mesh is what plain transformers and peft load: same values, names, ties."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from peft import PeftModel
from safetensors.torch import load_file
from test_load_weights import CONFIGS, MESHES, random_recipe, sharded_model, whole
from transformers import AutoModelForCausalLM, AutoTokenizer

from ndtrain.errors import CheckpointError
from ndtrain.model.adapter_weights import saved_key
from ndtrain.model.byte_tokenizer import build_byte_tokenizer
from ndtrain.parallel.runtime import Runtime
from ndtrain.plan.model_source import find_model
from ndtrain.plan.plan import ParallelPlan
from ndtrain.recipe.schema import Recipe
from ndtrain.train.export import export_adapter, export_model
from ndtrain.train.gather import Gather

IDS = torch.arange(24)[None]


def export_all(rank: int, plans: list[ParallelPlan], recipe: Recipe, folder: Path) -> None:
    runtime = Runtime(rank, len(MESHES) and plans[0].world_size, rank, torch.device("cpu"))
    for number, plan in enumerate(plans):
        model = sharded_model(recipe, plan)
        export_model(
            model,
            build_byte_tokenizer(),
            find_model(recipe),
            folder / str(number),
            runtime=runtime,
            shard_bytes=20_000,
        )


@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_mesh_exports_the_files_of_one_process(name: str, tmp_path: Path) -> None:
    recipe = random_recipe(CONFIGS[name])
    run_forked(1, tmp_path, export_all, MESHES[1], recipe, tmp_path / "one")
    run_forked(4, tmp_path, export_all, MESHES[4], recipe, tmp_path / "many")
    reference = read_folder(tmp_path / "one" / "0")
    assert len(reference) > 1, "the model was meant to fill several files"
    for number, plan in enumerate(MESHES[4]):
        assert read_folder(tmp_path / "many" / str(number)) == reference, plan
    config = json.loads((tmp_path / "one" / "0" / "config.json").read_text())
    tied = config.get("tie_word_embeddings", False)
    keys = json.loads((tmp_path / "one" / "0" / "model.safetensors.index.json").read_text())
    assert ("lm_head.weight" in keys["weight_map"]) is not tied
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "one" / "0", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert config["architectures"] == [type(model).__name__]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one" / "0")
    assert tokenizer.chat_template == build_byte_tokenizer().chat_template
    assert model.generation_config.eos_token_id is not None


def read_folder(folder: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.suffix == ".safetensors" or file.name.startswith("config")
    }


ADAPTED: dict[str, Any] = {
    "adapter": "lora",
    "lora_r": 3,
    "lora_target_modules": ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
}


def export_adapters(
    rank: int, plans: list[ParallelPlan], recipe: Recipe, base: Path, folder: Path
) -> dict[str, torch.Tensor]:
    """Adapters whose values were changed as training would; returns the first mesh's values."""
    runtime = Runtime(rank, plans[0].world_size, rank, torch.device("cpu"))
    source = find_model(recipe)
    for number, plan in enumerate(plans):
        model = sharded_model(recipe, plan)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.01)
        export_adapter(model, None, source, folder / str(number), runtime=runtime)
        gathered = Gather(model, trained_only=True).names
        assert gathered == [name for name, one in model.named_parameters() if one.requires_grad]
    return {
        name: whole(one.detach()).clone()
        for name, one in model.named_parameters()
        if one.requires_grad
    }


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"peft_use_dora": True},
        pytest.param({"peft_use_rslora": True}, marks=pytest.mark.slow),
    ],
)
def test_adapters_of_every_mesh_load_in_plain_peft(extra: dict[str, Any], tmp_path: Path) -> None:
    base = tmp_path / "base"
    run_forked(1, tmp_path, export_all, MESHES[1], random_recipe(CONFIGS["qwen3 tied"]), base)
    recipe = Recipe(base_model=str(base / "0"), learning_rate=1e-3, **ADAPTED, **extra)
    many = tmp_path / "many"
    values = run_forked(4, tmp_path, export_adapters, MESHES[4], recipe, base, many)[0]
    logits = []
    for number in range(len(MESHES[4])):
        stored = load_file(many / str(number) / "adapter_model.safetensors")
        assert len(stored) == len(values)
        model = AutoModelForCausalLM.from_pretrained(base / "0")
        adapted = PeftModel.from_pretrained(model, many / str(number)).eval()
        loaded = dict(adapted.named_parameters())
        for name, value in values.items():
            assert torch.equal(loaded[f"base_model.model.{name}"], value), name
        with torch.no_grad():
            logits.append(adapted(input_ids=IDS).logits)
    assert all(torch.equal(logits[0], other) for other in logits[1:])
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(base / "0")(input_ids=IDS).logits
    assert not torch.allclose(plain, logits[0])


def continue_from(
    _: int, plans: list[ParallelPlan], recipe: Recipe, adapter: Path
) -> list[dict[str, torch.Tensor]]:
    """Per mesh, the whole values of what is trained when a run starts from a saved adapter."""
    started = []
    for plan in plans:
        model = sharded_model(recipe, plan, adapter=adapter)
        started.append(
            {
                saved_key(name): whole(one.detach()).clone()
                for name, one in model.named_parameters()
                if one.requires_grad
            }
        )
    return started


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"peft_use_dora": True, "lora_modules_to_save": ("norm",)},
    ],
)
def test_every_mesh_continues_from_a_saved_adapter(extra: dict[str, Any], tmp_path: Path) -> None:
    base = tmp_path / "base"
    run_forked(1, tmp_path, export_all, MESHES[1], random_recipe(CONFIGS["qwen3 tied"]), base)
    recipe = Recipe(base_model=str(base / "0"), learning_rate=1e-3, **ADAPTED, **extra)
    saved = tmp_path / "saved"
    run_forked(1, tmp_path, export_adapters, MESHES[1], recipe, base, saved)
    stored = load_file(saved / "0" / "adapter_model.safetensors")
    (tmp_path / "run").mkdir()
    (saved / "0").rename(tmp_path / "run" / "export")
    for started in run_forked(4, tmp_path, continue_from, MESHES[4], recipe, tmp_path / "run"):
        for plan, values in zip(MESHES[4], started, strict=True):
            assert values.keys() == stored.keys(), plan
            assert all(torch.equal(values[key], stored[key]) for key in stored), plan


def export_untrained(rank: int, recipe: Recipe, folder: Path) -> str:
    runtime = Runtime(rank, 2, rank, torch.device("cpu"))
    model = sharded_model(recipe, ParallelPlan(dp_shard=2))
    try:
        export_adapter(model, None, find_model(recipe), folder, runtime=runtime)
    except CheckpointError as error:
        return str(error)
    return ""


def test_an_adapter_that_did_not_train_is_refused_on_every_rank(tmp_path: Path) -> None:
    recipe = random_recipe(CONFIGS["llama"], **ADAPTED)
    messages = run_forked(2, tmp_path, export_untrained, recipe, tmp_path / "adapter")
    assert all("still zero after training" in message for message in messages)
    assert not (tmp_path / "adapter").exists()
