"""Merged folders equal adapter-on-base within the printed rounding, ties and dtypes kept."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ndtrain.errors import MeshError, RecipeError
from ndtrain.model.adapters import apply_adapter
from ndtrain.model.build import build_model
from ndtrain.model.weights import load_weights
from ndtrain.parallel.runtime import Runtime
from ndtrain.plan.model_source import find_model
from ndtrain.recipe.schema import Recipe
from ndtrain.train.export import export_adapter
from ndtrain.train.merge import merge

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
IDS = torch.arange(20)[None]
CPU = torch.device("cpu")


def base_folder(folder: Path, dtype: torch.dtype, **config: Any) -> Path:
    recipe = Recipe(model_config={"model_type": "llama", **SIZES, **config}, learning_rate=1.0)
    source = find_model(recipe)
    model = build_model(source, recipe)
    load_weights(model, source, seed=5, device=CPU)
    model.to(dtype).save_pretrained(folder)
    return folder


def adapter_folder(folder: Path, base: Path, **keys: Any) -> Path:
    """An adapter with values as after training."""
    recipe = Recipe(base_model=str(base), learning_rate=1.0, adapter="lora", lora_r=3, **keys)
    source = find_model(recipe)
    model = apply_adapter(build_model(source, recipe), recipe)
    load_weights(model, source, seed=5, device=CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator()) * 0.02)
    runtime = Runtime(0, 1, 0, CPU)
    export_adapter(model, None, source, folder, runtime=runtime)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


CASES: dict[str, dict[str, Any]] = {
    "linears": {"lora_target_linear": True},
    "rslora": {"lora_target_linear": True, "peft_use_rslora": True},
    "dora": {"lora_target_linear": True, "peft_use_dora": True},
    "head": {"lora_target_modules": ("q_proj", "lm_head")},
    "embedding": {"lora_target_modules": ("q_proj", "embed_tokens")},
    "whole embedding": {
        "lora_target_modules": ("q_proj",),
        "lora_modules_to_save": ("embed_tokens",),
    },
    "patterns": {
        "lora_target_modules": ("q_proj",),
        "unfrozen_parameters": ("layernorm", r"layers\.1\.mlp\.down_proj", "embed_tokens"),
    },
    "whole norm": {"lora_target_modules": "q_proj", "lora_modules_to_save": ("norm",)},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", list(CASES))
def test_merged_model_equals_adapter_on_base(
    case: str, tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = base_folder(tmp_path / "base", torch.float32, tie_word_embeddings=tied)
    adapter = adapter_folder(tmp_path / "adapter", base, **CASES[case])
    assert merge(adapter, tmp_path / "merged") == 0
    assert "largest rounding error 0 in" in capsys.readouterr().out
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    merged, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not torch.allclose(logits(merged), logits(AutoModelForCausalLM.from_pretrained(base)))
    assert torch.allclose(logits(merged), logits(adapted), atol=1e-5, rtol=1e-5)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    # an adapter on one side of a tie ends it; both sides trained as one keep it
    keeps = tied and case not in ("head", "embedding")
    assert bool(config.get("tie_word_embeddings")) is keeps


def test_a_bf16_base_stays_bf16_and_the_rounding_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = base_folder(tmp_path / "base", torch.bfloat16)
    adapter = adapter_folder(tmp_path / "adapter", base, lora_target_linear=True)
    merge(adapter, tmp_path / "merged")
    told = float(capsys.readouterr().out.split("rounding error ")[1].split(" ")[0])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.bfloat16
    size = sum(file.stat().st_size for file in (tmp_path / "merged").glob("*.safetensors"))
    assert size < 1.1 * sum(file.stat().st_size for file in base.glob("*.safetensors"))
    exact = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter
    ).merge_and_unload()
    worst = max(
        float((one.detach() - merged.get_parameter(name).detach().float()).abs().max())
        for name, one in exact.named_parameters()
    )
    assert worst == pytest.approx(told, rel=0.01)
    assert 0 < told < 0.01


def test_updates_that_bf16_would_lose_are_told_and_kept_in_fp32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = base_folder(tmp_path / "base", torch.bfloat16)
    adapter = adapter_folder(tmp_path / "adapter", base, lora_target_modules="q_proj")
    weights = load_file(adapter / "adapter_model.safetensors")
    # 1 % of what training gave
    small = {key: one * (0.01 if "lora_B" in key else 1) for key, one in weights.items()}
    save_file(small, adapter / "adapter_model.safetensors", {"format": "pt"})
    merge(adapter, tmp_path / "merged")
    said = capsys.readouterr().out
    share = int(said.split("Rounding took ")[1].split("%")[0])
    exact = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter
    ).merge_and_unload()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    lost = gained = 0.0
    for name, one in exact.named_parameters():
        lost += float((one - rounded.get_parameter(name)).square().sum())
        gained += float((one - plain.get_parameter(name)).square().sum())
    assert share == pytest.approx(100 * math.sqrt(lost / gained), abs=1)
    merge(adapter, tmp_path / "whole", dtype="fp32")
    assert "Rounding took" not in capsys.readouterr().out
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype="auto")
    assert whole.dtype == torch.float32
    assert torch.allclose(logits(whole), logits(exact), atol=1e-6)
    with pytest.raises(RecipeError, match="'fp16' is not a dtype"):
        merge(adapter, tmp_path / "other", dtype="fp16")


def test_the_adapter_and_its_base_are_never_merged_over(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", torch.float32)
    adapter = adapter_folder(tmp_path / "adapter", base, lora_target_linear=True)
    for what, folder in {"adapter": adapter, "base": base}.items():
        kept = {file.name: file.read_bytes() for file in folder.iterdir()}
        with pytest.raises(RecipeError, match=f"is the {what} that is merged. Name another."):
            merge(adapter, folder)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == kept


def test_a_run_without_adapter_says_what_to_do(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", torch.float32)
    adapter = adapter_folder(tmp_path / "adapter", base, lora_target_linear=True)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "gone")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(MeshError, match="gone' does not exist"):
        merge(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
