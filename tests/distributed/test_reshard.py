"""A checkpoint of any mesh continues on any other: states bit for bit, steps to rounding."""

from pathlib import Path
from typing import Any

import pytest
from forked import run_forked
from reshard_engine import SAVED_AT, VOCABULARY, Case, Trace, continued, unbroken

from ndtrain.plan.plan import ParallelPlan
from ndtrain.recipe.schema import Recipe

# Odd sizes, so that shards are uneven and some ranks hold nothing of a tensor.
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LORA: dict[str, Any] = {
    "adapter": "lora",
    "lora_r": 3,
    "lora_target_linear": True,
    "lora_dropout": 0.1,
}

MESHES = (
    ParallelPlan(),
    ParallelPlan(dp_replicate=2),
    ParallelPlan(dp_shard=2),
    ParallelPlan(cp=2, cp_method="allgather"),
    ParallelPlan(tp=2),
    ParallelPlan(dp_shard=4),
    ParallelPlan(dp_replicate=2, dp_shard=2),
    ParallelPlan(dp_replicate=2, cp=2, cp_method="ulysses"),
    ParallelPlan(dp_replicate=2, tp=2),
    ParallelPlan(dp_shard=2, cp=2, cp_method="allgather"),
    ParallelPlan(dp_shard=2, tp=2),
    ParallelPlan(cp=2, tp=2, cp_method="allgather"),
    ParallelPlan(tp=4),
    ParallelPlan(dp_replicate=2, dp_shard=2, cp=2, cp_method="allgather"),
    ParallelPlan(dp_replicate=2, dp_shard=2, tp=2),
    ParallelPlan(dp_shard=2, cp=2, tp=2, cp_method="allgather"),
)

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    # name: (model, recipe keys, to how many other meshes each mesh is carried)
    "llama": ({"model_type": "llama", **SIZES}, {}, 2),
    "tied qwen3": ({"model_type": "qwen3", "tie_word_embeddings": True, **SIZES}, {}, 1),
    "lora": ({"model_type": "llama", **SIZES}, LORA, 1),
    "moe": ({"model_type": "qwen3_moe", **SIZES, **MOE}, {}, 1),
}

FEW = ("llama", pytest.param("moe", marks=pytest.mark.slow))
"""Kinds whose meshes of one and two ranks are carried to each other alone."""


def recipe_of(kind: str) -> Recipe:
    model, keys, _ = KINDS[kind]
    return Recipe(
        model_config=model, tokenizer_config="bytes", learning_rate=3e-3, weight_decay=0.1, **keys
    )


def pairs(kind: str, meshes: tuple[ParallelPlan, ...]) -> list[tuple[ParallelPlan, ParallelPlan]]:
    """Every mesh saves, and every mesh loads what some others have saved."""
    count = len(meshes)
    _, _, targets = KINDS[kind]
    strides = (5, 3)[:targets]
    return [
        (meshes[number], meshes[(number + stride) % count])
        for number in range(count)
        for stride in strides
    ]


def name_of(plan: ParallelPlan) -> str:
    return "x".join(str(size) for size in plan.sizes)


def carry(kind: str, meshes: tuple[ParallelPlan, ...], tmp_path: Path) -> None:
    recipe = recipe_of(kind)
    before: dict[str, Trace] = {}
    for world_size in sorted({plan.world_size for plan in meshes}):
        cases = [
            (tmp_path / name_of(plan), Case(recipe, plan))
            for plan in meshes
            if plan.world_size == world_size
        ]
        traces = run_forked(world_size, tmp_path, unbroken, cases)[0]
        before |= {folder.name: trace for (folder, _), trace in zip(cases, traces, strict=True)}
    for world_size in sorted({plan.world_size for plan in meshes}):
        wanted = [pair for pair in pairs(kind, meshes) if pair[1].world_size == world_size]
        cases = [(tmp_path / name_of(saved), Case(recipe, loaded)) for saved, loaded in wanted]
        for (saved, loaded), trace in zip(
            wanted, run_forked(world_size, tmp_path, continued, cases)[0], strict=True
        ):
            earlier = before[name_of(saved)]
            what = f"{saved} -> {loaded}"
            assert trace.digest == earlier.digest, what
            assert trace.losses == pytest.approx(earlier.losses[SAVED_AT:], rel=1e-5), what
            assert trace.norms == pytest.approx(earlier.norms[SAVED_AT:], rel=1e-5), what


@pytest.mark.parametrize("kind", FEW)
def test_any_small_mesh_continues_another(kind: str, tmp_path: Path) -> None:
    carry(kind, tuple(plan for plan in MESHES if plan.world_size in (1, 2)), tmp_path)


@pytest.mark.slow
def test_a_vocabulary_that_no_axis_divides_is_carried(tmp_path: Path) -> None:
    """33 and 32 rows over tp, each over 4 shards: 9, 9, 9, 6 and 8, 8, 8, 8."""
    uneven = ParallelPlan(dp_shard=2, cp=2, tp=2, cp_method="allgather")
    carry("llama", (uneven, ParallelPlan(tp=2)), tmp_path)


# Large enough for blocks of 16 that share a scale, also over 2 tensor-parallel ranks.
WIDE = {**SIZES, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
SMALL_STATES: dict[str, dict[str, Any]] = {
    "8-bit": {"optimizer_state_dtype": "8bit"},
    "bf16 weights, 8-bit": {"param_dtype": "bf16", "optimizer_state_dtype": "8bit"},
    "bf16": {"param_dtype": "bf16", "optimizer_state_dtype": "bf16"},
}


@pytest.mark.parametrize(
    "kind",
    [
        # weights and states alike
        "bf16 weights, 8-bit",
        pytest.param("8-bit", marks=pytest.mark.slow),
        pytest.param("bf16", marks=pytest.mark.slow),
    ],
)
def test_states_in_few_bits_are_carried_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """On the same mesh, the steps after it too: rounding by chance goes on where it was."""
    recipe = Recipe(
        model_config={"model_type": "llama", **WIDE},
        tokenizer_config="bytes",
        learning_rate=3e-3,
        weight_decay=0.1,
        **SMALL_STATES[kind],
    )
    sharded, split = ParallelPlan(dp_shard=2), ParallelPlan(tp=2)
    saved = [(tmp_path / name_of(plan), Case(recipe, plan)) for plan in (sharded, split)]
    before = run_forked(2, tmp_path, unbroken, saved)[0]
    pairs = [(0, sharded), (1, split), (0, split), (1, sharded)]
    loaded = [(saved[number][0], Case(recipe, plan)) for number, plan in pairs]
    after = run_forked(2, tmp_path, continued, loaded)[0]
    for (number, plan), trace in zip(pairs, after, strict=True):
        assert trace.digest == before[number].digest
        remaining = before[number].losses[SAVED_AT:]
        if saved[number][1].plan == plan:
            assert trace.losses == remaining
        # gradients of another mesh differ in rounding, and a bf16 weight by its spacing
        assert trace.losses == pytest.approx(remaining, rel=1e-3 if "weights" in kind else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_any_mesh_continues_another(kind: str, tmp_path: Path) -> None:
    carry(kind, MESHES, tmp_path)


def test_the_matrix_is_as_large_as_promised() -> None:
    counts = {kind: len(set(pairs(kind, MESHES))) for kind in KINDS}
    assert sum(counts.values()) >= 40
    assert counts["lora"] >= 10
    assert counts["moe"] >= 10
