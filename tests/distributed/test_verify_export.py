"""The reload check: passes on what any mesh wrote, and fails on one matrix that is not it."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from safetensors.torch import load_file, save_file
from test_load_weights import CONFIGS, SIZES, random_recipe
from transformers import MistralConfig

from ndtrain.errors import CheckpointError
from ndtrain.model.build import build_model
from ndtrain.model.weights import load_weights
from ndtrain.parallel.mesh import build_mesh
from ndtrain.parallel.runtime import Runtime
from ndtrain.plan.model_source import find_model
from ndtrain.plan.plan import ParallelPlan
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import assemble
from ndtrain.train.export import export_adapter, export_model
from ndtrain.train.verify import probe_length, verify_export

PLANS = [
    ParallelPlan(cp=2, tp=2, cp_method="allgather"),
    ParallelPlan(dp_shard=2, tp=2),
    ParallelPlan(dp_replicate=2, cp=2, cp_method="ulysses"),
]


def damage_weights(export: Path) -> None:
    file = export / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 1.5
    save_file(tensors, file, {"format": "pt"})


def change_config(changes: dict[str, Any], export: Path) -> None:
    file = export / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def check(
    rank: int,
    recipe: Recipe,
    plans: list[ParallelPlan],
    folder: Path,
    damage: Callable[[Path], None],
) -> list[tuple[float | None, str]]:
    """Per mesh: the difference found, and what was said of a damaged copy (on rank 0)."""
    found: list[tuple[float | None, str]] = []
    cpu = torch.device("cpu")
    source = find_model(recipe)
    for number, plan in enumerate(plans):
        engine = assemble(recipe, source, build_mesh(plan, cpu))
        dest = folder / str(number)
        runtime = Runtime(rank, plan.world_size, rank, cpu)
        export_model(engine.model, None, source, dest, runtime=runtime)
        verdict = verify_export(engine, dest, source)
        if rank == 0:
            damage(dest)
        torch.distributed.barrier()
        said = ""
        try:
            verify_export(engine, dest, source)
        except CheckpointError as error:
            said = error.message
        found.append((verdict.difference if verdict else None, said))
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3 tied"])
def test_every_mesh_passes_and_damage_is_found(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {**CONFIGS[name], "num_key_value_heads": 4, "initializer_range": 0.3}
    recipe = random_recipe(sizes, device="cpu")
    main, *others = run_forked(
        4, tmp_path, check, recipe, PLANS, tmp_path / "exports", damage_weights
    )
    for (difference, said), plan in zip(main, PLANS, strict=True):
        assert difference is not None, plan
        assert difference < 1e-5, plan
        assert "the export computes other logits than the trained model" in said, plan
    assert all(one == [(None, "")] * len(PLANS) for one in others)


def check_rounded(rank: int, recipe: Recipe, folder: Path) -> list[float | None]:
    """Per mesh: the difference found after an export in bf16 of weights trained in fp32."""
    cpu = torch.device("cpu")
    source = find_model(recipe)
    found = []
    for number, plan in enumerate(PLANS):
        engine = assemble(recipe, source, build_mesh(plan, cpu))
        dest = folder / str(number)
        runtime = Runtime(rank, 4, rank, cpu)
        export_model(engine.model, None, source, dest, runtime=runtime, dtype=torch.bfloat16)
        verdict = verify_export(engine, dest, source)
        found.append(verdict.difference if verdict else None)
    return found


def test_the_rounding_of_a_shorter_dtype_is_no_difference(tmp_path: Path) -> None:
    sizes = {**CONFIGS["llama"], "num_key_value_heads": 4, "initializer_range": 0.3}
    recipe = random_recipe(sizes, device="cpu")
    main, *_ = run_forked(4, tmp_path, check_rounded, recipe, tmp_path / "exports")
    stored = load_file(tmp_path / "exports/0/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    for difference, plan in zip(main, PLANS, strict=True):
        assert difference is not None, plan
        assert difference < 1e-5, plan


PAIRS = [
    ParallelPlan(dp_shard=2),
    ParallelPlan(tp=2),
    ParallelPlan(cp=2, cp_method="ulysses"),
]
_MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}


@pytest.mark.parametrize(
    ("model_type", "sizes", "changes", "plans"),
    [
        ("gemma2", {"final_logit_softcapping": 2.0}, {"final_logit_softcapping": None}, PAIRS),
        (
            "falcon_h1",
            {"lm_head_multiplier": 0.25, **_MAMBA},
            {"lm_head_multiplier": 1.0},
            PAIRS[:1],
        ),
        # longer than the few tokens that are enough elsewhere
        ("mistral", {"sliding_window": 24}, {"sliding_window": None}, PAIRS),
    ],
)
def test_what_the_configuration_does_to_logits_is_compared(
    model_type: str,
    sizes: dict[str, Any],
    changes: dict[str, Any],
    plans: list[ParallelPlan],
    tmp_path: Path,
) -> None:
    model = {**SIZES, "model_type": model_type, "initializer_range": 0.3, **sizes}
    recipe = random_recipe(model, device="cpu")
    damage = partial(change_config, changes)
    main, _ = run_forked(2, tmp_path, check, recipe, plans, tmp_path / "exports", damage)
    for (difference, said), plan in zip(main, plans, strict=True):
        assert difference is not None, plan
        assert difference < 1e-5, plan
        assert "the export computes other logits than the trained model" in said, plan


@pytest.mark.parametrize(
    ("window", "sizes", "length"),
    [
        (None, {}, 16),
        (24, {}, 40),
        (1008, {}, 1024),
        (1009, {}, 16),
        # no window hides anything from rows of 2048 tokens
        (2048, {}, 16),
        (512, {"hidden_size": 4096, "num_hidden_layers": 32}, 16),
        (512, {"vocab_size": 300_000}, 16),
    ],
)
def test_the_probe_is_longer_than_a_window_where_that_is_cheap(
    window: int | None, sizes: dict[str, Any], length: int
) -> None:
    config = MistralConfig(**{**SIZES, "sliding_window": window, **sizes})
    assert probe_length(config, 2048) == length


ADAPTER_PLANS = [
    ParallelPlan(dp_shard=2, tp=2),
    ParallelPlan(dp_replicate=2, dp_shard=2),
    ParallelPlan(cp=2, tp=2, cp_method="allgather"),
]


def check_adapters(rank: int, recipe: Recipe, folder: Path) -> list[float | None]:
    """Difference between each mesh's logits and plain peft's, after a change as by training."""
    cpu = torch.device("cpu")
    source = find_model(recipe)
    found = []
    for number, plan in enumerate(ADAPTER_PLANS):
        engine = assemble(recipe, source, build_mesh(plan, cpu))
        with torch.no_grad():
            for parameter in engine.parameters:
                parameter.add_(0.02)
        dest = folder / str(number)
        runtime = Runtime(rank, 4, rank, cpu)
        export_adapter(engine.model, None, source, dest, runtime=runtime)
        verdict = verify_export(engine, dest, source)
        found.append(verdict.difference if verdict else None)
    return found


@pytest.mark.parametrize(
    "keys",
    [
        {"lora_target_modules": ("q_proj", "v_proj", "o_proj", "down_proj", "lm_head")},
        {"lora_target_linear": True, "peft_use_dora": True},
        {"lora_target_linear": True, "lora_modules_to_save": ("embed_tokens", "norm")},
        {"lora_target_modules": ("q_proj",), "unfrozen_parameters": ("norm", "down_proj")},
    ],
    ids=["head", "dora", "whole modules", "patterns"],
)
@pytest.mark.parametrize("name", ["llama", "qwen3 tied"])
def test_plain_peft_computes_the_logits_of_every_mesh(
    name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {**CONFIGS[name], "num_key_value_heads": 4, "initializer_range": 0.3}
    plain = random_recipe(sizes)
    model = build_model(find_model(plain), plain)
    load_weights(model, find_model(plain), seed=2, device=torch.device("cpu"))
    model.save_pretrained(tmp_path / "base")
    recipe = Recipe(
        base_model=str(tmp_path / "base"),
        learning_rate=1e-3,
        device="cpu",
        adapter="lora",
        lora_r=3,
        **keys,
    )
    main, *_ = run_forked(4, tmp_path, check_adapters, recipe, tmp_path / "adapters")
    for difference, plan in zip(main, ADAPTER_PLANS, strict=True):
        assert difference is not None, plan
        assert difference < 1e-5, plan
