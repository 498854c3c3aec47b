"""Traced activations: what the compiler keeps of a block, and what that says of measured runs."""

from functools import cache
from pathlib import Path

import pytest

from ndtrain.errors import MeshError
from ndtrain.plan.accuracy import read_runs
from ndtrain.plan.book import find_in_book
from ndtrain.plan.facts import facts_from_config
from ndtrain.plan.hardware import GIB, calibration
from ndtrain.plan.memory import predict_memory
from ndtrain.plan.plan import ParallelPlan
from ndtrain.plan.setting import Precision, Setting
from ndtrain.recipe.load import load_recipe
from ndtrain.train import exact_memory as exact
from ndtrain.train.exact_memory import exact_memory, traced_bytes, traced_memory

RUNS = read_runs(Path(__file__).parents[1] / "plan" / "data" / "measured_runs.yaml")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def setting(policy="none", **keys):
    return Setting(ParallelPlan(), 1, 1, 2048, policy, Precision(), 1, **keys)


def traced(config, **keys):
    return traced_bytes(
        config, facts_from_config(config, name="m", source="recipe"), setting(**keys)
    )


def test_a_compiled_llama_block_keeps_what_the_formula_counts():
    f, h, q, k, heads = 176, 64, 64, 32, 4

    assert traced(LLAMA) == 6 * f + 8 * h + 4 * q + 4 * k + 4 * heads + 8
    assert traced(LLAMA, policy="budget") == 4 * f + 4 * h + 4 * q + 4 * k + 4 * heads + 8


def test_without_the_compiler_more_is_kept():
    f, h, q, k, heads = 176, 64, 64, 32, 4

    assert traced(LLAMA, compiled=False) == 8 * f + 18 * h + 2 * q + 4 * k + 4 * heads + 8


def test_scores_written_out_are_left_to_the_planner():
    gemma = LLAMA | {"model_type": "gemma2", "head_dim": 16}

    assert traced(gemma, compiled=False) < 20 * (176 + 64)


@cache
def traced_once(model, policy):
    return traced_bytes(find_in_book(model).config, facts_of(model), setting(policy))


def facts_of(model):
    return facts_from_config(find_in_book(model).config, name=model, source="book")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.label)
def test_measured_runs_are_within_five_percent(run, monkeypatch):
    kept = traced_once(run.facts.name, run.setting.policy)
    # one trace serves every run of a model and policy
    monkeypatch.setattr(exact, "traced_bytes", lambda *_: kept)
    config = find_in_book(run.facts.name).config

    predicted = traced_memory(config, run.facts, run.setting, calibration()) / GIB

    assert abs(predicted / run.memory_gib - 1) < 0.05


def test_named_policies_need_no_trace():
    facts = facts_from_config(LLAMA, name="m", source="recipe")
    full = setting("full")

    planned = predict_memory(facts, full, calibration()).reserved
    assert traced_memory(LLAMA, facts, full, calibration()) == planned


def test_a_recipe_of_the_book_is_traced(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    path = tmp_path / "r.yaml"
    path.write_text("base_model: zai-org/GLM-4-9B-0414\nlearning_rate: 1e-4\n")
    loaded = load_recipe(path, check=False)
    facts = facts_of("zai-org/GLM-4-9B-0414")

    planned = predict_memory(facts, setting(), calibration()).reserved

    assert 1.02 < exact_memory(loaded, setting()) / planned < 1.25  # its four norms a block


def test_what_cannot_be_traced_is_said(monkeypatch):
    broken = LLAMA | {"num_key_value_heads": 3}

    with pytest.raises(MeshError, match=r"a block of 'llama' cannot be traced: .* --exact out"):
        traced(broken)


@pytest.mark.parametrize(
    ("keys", "more"),
    [
        ({"compiled": False}, 18 * 64 + 2 * 64 + 4 * 32),
        ({}, 8 * 64 + 4 * 64 + 4 * 32),
        ({"policy": "budget"}, 6 * 64 + 4 * 64 + 4 * 32),
    ],
)
def test_of_a_tiled_mlp_the_input_is_kept(keys, more):
    log_sums, norms = 4 * 4, 8

    assert traced(LLAMA, tiled=True, **keys) == more + log_sums + norms
