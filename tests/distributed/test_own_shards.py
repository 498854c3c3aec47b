"""One rank computes with its own shards: without copies, and with the values of the moment."""

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from mesh_cells import MICRO_TOKENS, micro_batch, plan_of, source_of, tiny_recipe
from torch.distributed.fsdp import FSDPModule
from torch.profiler import profile

from ndtrain.data.batch import StepBatch
from ndtrain.model.regions import local_tensor
from ndtrain.parallel.mesh import build_mesh
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import Engine, assemble
from ndtrain.train.step import accumulate_gradients, update


def elements_of(operations: Iterable[Any], *names: str) -> int:
    """Elements that operations of these names wrote to."""
    return sum(prod(one.input_shapes[0]) for one in operations if one.name in names)


def batch(passes: int = 2) -> StepBatch:
    micro = tuple(micro_batch(number) for number in range(passes))
    tokens = MICRO_TOKENS * passes
    return StepBatch(micro, tokens, tokens, 0, passes, 0.0)


def built(recipe: Recipe) -> Engine:
    mesh = build_mesh(plan_of(recipe).parallel, torch.device("cpu"))
    return assemble(recipe, source_of(recipe), mesh)


def one_step(_rank: int, recipe: Recipe) -> tuple[int, int, list[torch.Tensor]]:
    """Elements that a step copied, those of the trained parameters, and the gradients."""
    engine = built(recipe)
    with profile(record_shapes=True) as seen:
        accumulate_gradients(engine, batch(), 0, 1.0)
    copied = elements_of(seen.events(), "aten::copy_", "aten::cat")
    gradients = [local_tensor(parameter.grad).clone() for parameter in engine.parameters]
    assert all(
        found.dtype == parameter.dtype and found.shape == parameter.shape
        for found, parameter in zip(gradients, engine.parameters, strict=True)
    )
    return copied, sum(one.numel() for one in engine.parameters), gradients


def early_pass(_rank: int, recipe: Recipe) -> tuple[int, int, int]:
    """Elements that a pass which steps early copied, those of the parameters, and its steps."""
    engine = built(recipe)
    accumulate_gradients(engine, batch(1), 0, 1.0)
    with profile(record_shapes=True) as seen:
        accumulate_gradients(engine, batch(1), 1, 1.0)
    assert all(parameter.grad is None for parameter in engine.parameters)
    events = seen.events()
    copied = elements_of(events, "aten::copy_", "aten::cat")
    steps = sum(one.name.startswith("Optimizer.step#") for one in events)
    return copied, sum(one.numel() for one in engine.parameters), steps


def test_a_pass_that_steps_early_copies_none_and_steps_each_block_once(tmp_path: Path) -> None:
    keys = {"optimizer_in_backward": True, "max_grad_norm": None, "global_batch_size": 1}
    recipe = tiny_recipe(tmp_path / "unread.jsonl", **keys)
    ((copied, trained, steps),) = run_forked(1, tmp_path, early_pass, recipe)
    assert copied < trained / 4
    # two blocks; embedding, last norm and head alone
    assert steps == 2 + 3


def test_no_weight_and_no_gradient_is_copied(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path / "unread.jsonl")
    ((copied, trained, _),) = run_forked(1, tmp_path, one_step, recipe)
    # what is copied are the activations of 16 tokens
    assert copied < trained / 4


def computed_with(
    _rank: int, recipe: Recipe
) -> list[tuple[str, torch.dtype, bool, torch.Tensor, torch.Tensor]]:
    """After a step, of each parameter: its name, the dtype it is computed in, whether that shares
    its memory, its values, and those that are computed with next."""
    engine = built(recipe)
    result = accumulate_gradients(engine, batch(), 0, 1.0)
    update(engine, result)
    sharded = dict(engine.trainable.named_parameters())
    units = [one for one in engine.trainable.modules() if isinstance(one, FSDPModule)]
    for unit in units:
        unit.unshard()
    found = []
    for name, computed in engine.trainable.named_parameters():
        held = local_tensor(sharded[name])
        values = local_tensor(computed)
        shares = values.data_ptr() == held.data_ptr()
        found.append((name, computed.dtype, shares, held.clone(), values.clone()))
    return found


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"bf16": True},
        {"bf16": True, "param_dtype": "bf16"},
        {"bf16": True, "adapter": "lora", "lora_r": 4, "lora_target_linear": True},
        {"sizes": {"tie_word_embeddings": True}},
        {"bf16": True, "tensor_parallel_size": 2},
        {"tensor_parallel_size": 2},
    ],
    ids=["fp32", "bf16 of fp32", "bf16", "adapter", "tied", "tp, bf16 of fp32", "tp, fp32"],
)
def test_what_is_computed_with_follows_the_weights(keys: dict[str, Any], tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path / "unread.jsonl", **keys)
    found, *_ = run_forked(recipe.tensor_parallel_size, tmp_path, computed_with, recipe)
    dtype = torch.bfloat16 if "bf16" in keys else torch.float32
    assert len(found) >= 20
    for name, computed_in, shares, held, computed in found:
        assert computed_in == dtype, name
        assert shares == (held.dtype == dtype), name
        assert torch.equal(held.to(dtype), computed), name


@pytest.mark.parametrize("keys", [{}, {"bf16": True}], ids=["fp32", "bf16 of fp32"])
def test_gradients_are_those_of_two_ranks(keys: dict[str, Any], tmp_path: Path) -> None:
    """Two copies that see the same rows sum to twice what one rank finds."""
    one = tiny_recipe(tmp_path / "unread.jsonl", **keys)
    two = one.model_copy(update={"dp_replicate_size": 2})
    ((_, _, alone),) = run_forked(1, tmp_path, one_step, one)
    (_, _, summed), _ = run_forked(2, tmp_path, one_step, two)
    for found, twice in zip(alone, summed, strict=True):
        torch.testing.assert_close(2 * found, twice, rtol=1e-6, atol=1e-9)
