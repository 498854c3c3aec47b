"""Tiny models, unequal rows and the comparison of a mesh with one process."""

import json
import math
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ndtrain.data.batch import MicroBatch
from ndtrain.data.prepare import prepare
from ndtrain.launch import LaunchOptions, launch
from ndtrain.model.byte_tokenizer import build_byte_tokenizer
from ndtrain.model.tokenizer import tokenizer_key
from ndtrain.plan.decide import decide
from ndtrain.plan.facts import facts_from_config
from ndtrain.plan.model_source import ModelSource, find_model
from ndtrain.plan.plan import Plan
from ndtrain.recipe.schema import Recipe
from ndtrain.train.cells import Cell, CellsJob, Trace, run_cells

STEPS = 5
MICRO_TOKENS = 8
"""Of the one row of `micro_batch`."""
VOCABULARY = 97
"""Divides by nothing, so that every split of the vocabulary is uneven."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 92,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_WINDOW = {"head_dim": 8, "sliding_window": 8}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "mistral": _WINDOW,
    "gemma2": {**_WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_WINDOW, "query_pre_attn_scalar": 8},
    "phi3": {"sliding_window": 8},
    "olmo2": {},
    # its released models scale scores by 1 / head features; the default of 1 saturates them
    "granite": {"attention_multiplier": 0.125},
    "glm4": {"head_dim": 8},
    "cohere2": {"sliding_window": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "decoder_sparse_step": 1, **_EXPERTS},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **_EXPERTS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 8,
    },
}


def write_rows(path: Path, *, rows: int = 40, longest: int = 32, seed: int = 0) -> Path:
    """Tokenised rows of very unequal length and very unequal numbers of trained tokens."""
    random = np.random.default_rng(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            length = int(random.integers(4, longest + 1))
            trained = int(random.choice([1, 2, length // 2, length - 1]))
            ids = random.integers(3, VOCABULARY, length).tolist()
            labels = [-100] * (length - trained) + ids[length - trained :]
            file.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")
    return path


def micro_batch(number: int) -> MicroBatch:
    """A row of this data rank: every rank and every pass has its own."""
    ids = 3 + torch.arange(MICRO_TOKENS)[None] * (number + 3) % 90
    row = torch.zeros(1, MICRO_TOKENS, dtype=torch.long)
    places = torch.arange(MICRO_TOKENS)[None]
    return MicroBatch(ids, torch.roll(ids, -1), places, row, row_ids=torch.tensor([number]))


def tiny_recipe(data: Path, architecture: str = "llama", **keys: Any) -> Recipe:
    """A recipe over tokenised rows with a random model of one architecture."""
    sizes = {"model_type": architecture, **SIZES, **ARCHITECTURES[architecture]}
    sizes |= keys.pop("sizes", {})
    values: dict[str, Any] = {
        "model_config": sizes,
        "tokenizer_config": "bytes",
        "datasets": [{"path": str(data), "type": None}],
        "sequence_len": 32,
        "tensor_sequence_parallel": "auto",
        "pad_to_multiple_of": 4,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "learning_rate": 3e-3,
        # Adam divides a gradient that cancels to nothing by its own size; fp32's rounding of the
        # sum, some 1e-7, must stay small beside this
        "adam_epsilon": 1e-5,
        "lr_scheduler": "constant",
        "loss_chunk_tokens": 24,
        "device": "cpu",
    }
    return Recipe.model_validate({**values, **keys})


def with_mesh(recipe: Recipe, mesh: Sequence[int], **keys: Any) -> Recipe:
    """The same recipe on (dp_replicate, dp_shard, cp, tp)."""
    replicate, shard, cp, tp = mesh
    sizes = {
        "dp_replicate_size": replicate,
        "dp_shard_size": shard,
        "context_parallel_size": cp,
        "tensor_parallel_size": tp,
    }
    return recipe.model_copy(update={**sizes, **keys})


@cache
def _tokenizer() -> Any:
    return build_byte_tokenizer()


def source_of(recipe: Recipe) -> ModelSource:
    """The random model of a recipe."""
    return find_model(recipe)


def plan_of(recipe: Recipe) -> Plan:
    """The plan a start of this recipe would have."""
    source = source_of(recipe)
    # planning refuses 8-bit matmuls of narrow models, which are slower, not wrong
    planned = recipe.model_copy(update={"fp8": False})
    return decide(planned, facts_from_config(source.config, name="tiny", source="recipe"))


def prepare_rows(recipe: Recipe, folder: Path) -> Path:
    """Tokenise a recipe's rows."""
    tokenizer = _tokenizer()
    return prepare(recipe, tokenizer, tokenizer_key(tokenizer), folder / "prepared").path


def trace_cells(
    recipes: Sequence[Recipe],
    folder: Path,
    steps: int = STEPS,
    start: Callable[..., int] = launch,
) -> list[Trace]:
    """Run recipes of one world size in one set of processes, which `start` starts."""
    cells = tuple(
        Cell(recipe, source_of(recipe), plan_of(recipe), prepare_rows(recipe, folder), steps)
        for recipe in recipes
    )
    world_size = cells[0].plan.parallel.world_size
    run_dir = folder / f"world-{world_size}-{len(list(folder.iterdir()))}"
    (run_dir / "logs").mkdir(parents=True)
    job = CellsJob(cells, run_dir)
    options = LaunchOptions(world_size=world_size, run_dir=run_dir, device="cpu")
    assert start(job, run_cells, options) == 0
    return [job.trace(number) for number in range(len(cells))]


def trace_cells_apart(recipes: Sequence[Recipe], folder: Path, steps: int = STEPS) -> list[Trace]:
    """The same from a process that has done nothing else.

    The ranks are forked from it, and a compiler that has worked before the fork, as in earlier
    tests, may leave them a lock that nobody opens.
    """
    clean = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, clean) as processes:
        return processes.submit(trace_cells, recipes, folder, steps).result()


MeshT = TypeVar("MeshT", bound=Sequence[int])


def by_world_size(meshes: Sequence[MeshT]) -> dict[int, list[MeshT]]:
    """Meshes that one set of processes can run one after the other."""
    groups: dict[int, list[MeshT]] = {}
    for mesh in meshes:
        groups.setdefault(math.prod(mesh), []).append(mesh)
    return groups


def names_of(recipe: Recipe) -> str:
    """What the support matrix says of a cell that passed."""
    sizes = recipe.model_config_ or {}
    mesh = (
        recipe.dp_replicate_size,
        recipe.dp_shard_size,
        recipe.context_parallel_size,
        recipe.tensor_parallel_size,
    )
    return json.dumps(
        {
            "architecture": sizes["model_type"],
            "packed": recipe.sample_packing,
            "adapter": "dora" if recipe.peft_use_dora else recipe.adapter or "none",
            "cp_method": recipe.context_parallel_method,
            "mesh": mesh,
        }
    )


def assert_same(trace: Trace, reference: Trace, what: object) -> None:
    """Losses to 1e-5 and norms to 1e-4 relative, parameters to 1e-4."""
    np.testing.assert_allclose(trace.losses, reference.losses, rtol=1e-5, err_msg=str(what))
    np.testing.assert_allclose(trace.grad_norms, reference.grad_norms, rtol=1e-4, err_msg=str(what))
    assert trace.parameters.keys() == reference.parameters.keys()
    for name, parameter in reference.parameters.items():
        np.testing.assert_allclose(
            trace.parameters[name].numpy(),
            parameter.numpy(),
            rtol=0,
            atol=1e-4,
            err_msg=f"{what} {name}",
        )
