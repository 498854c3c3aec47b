"""Products that are computed while tokens travel are those that wait for them."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import run_forked
from mesh_cells import (
    assert_same,
    by_world_size,
    source_of,
    tiny_recipe,
    trace_cells,
    with_mesh,
    write_rows,
)
from test_sequence_parallel import LAYERS, Exchanges, batch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from ndtrain.parallel.linear import ColumnLinear
from ndtrain.parallel.mesh import build_mesh
from ndtrain.parallel.overlap import gather_and_multiply, gather_multiply, multiply_and_scatter
from ndtrain.plan.plan import ParallelPlan
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import assemble
from ndtrain.train.step import micro_batch_loss

Mesh = tuple[int, int, int, int]
TOKENS, INPUTS, OUTPUTS = 5, 6, (4, 7)
"""Tokens of a rank's share, and features; nothing divides by anything."""


def whole_case(ranks: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """All tokens [T, I] and the weights [O, I] that every rank draws alike."""
    torch.manual_seed(0)
    tokens = torch.randn(ranks * TOKENS, INPUTS, dtype=torch.float64)
    return tokens, [torch.randn(width, INPUTS, dtype=torch.float64) for width in OUTPUTS]


def column_gradients(rank: int, ranks: int, frozen: bool, reads_whole: bool) -> list[torch.Tensor]:
    """Products, and gradients of this rank's share and of what is trained."""
    tokens, weights = whole_case(ranks)
    share = tokens.chunk(ranks)[rank].clone().requires_grad_()
    weights = [weight.clone().requires_grad_(not frozen) for weight in weights]
    whole, *products = gather_and_multiply(share, weights, dist.group.WORLD)
    # every rank hands back a gradient of its own, and the share's is the sum
    loss = sum(product.square().sum() for product in products) * (rank + 1)
    if reads_whole:
        loss = loss + whole.pow(3).sum()
    sources = [share, *([] if frozen else weights)]
    return [whole, *products, *torch.autograd.grad(loss, sources)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reads_whole", [False, True])
def test_gathered_tokens_are_multiplied_as_if_whole(
    ranks: int, frozen: bool, reads_whole: bool, tmp_path: Path
) -> None:
    results = run_forked(ranks, tmp_path, column_gradients, ranks, frozen, reads_whole)

    tokens, weights = whole_case(ranks)
    summed = torch.zeros_like(tokens)
    for rank, found in enumerate(results):
        whole, trained = tokens.clone().requires_grad_(), [w.clone() for w in weights]
        sources = [whole, *(weight.requires_grad_() for weight in trained)]
        products = [whole @ weight.T for weight in trained]
        loss = sum(product.square().sum() for product in products) * (rank + 1)
        if reads_whole:
            loss = loss + whole.pow(3).sum()
        of_whole, *of_weights = torch.autograd.grad(loss, sources)
        summed += of_whole
        wanted = [tokens, *products, *([] if frozen else of_weights)]
        for one, other in zip([*found[:3], *found[4:]], wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for rank, found in enumerate(results):
        own = summed.chunk(ranks)[rank]
        torch.testing.assert_close(found[3], own, rtol=1e-12, atol=1e-12)


def one_product_read(rank: int) -> list[torch.Tensor]:
    """Gradients where nothing reads the second product, and the share wants none."""
    tokens, (first, second) = whole_case(2)
    share = tokens.chunk(2)[rank]
    first.requires_grad_()
    second.requires_grad_()
    _, product, _ = gather_and_multiply(share, [first, second], dist.group.WORLD)
    found = torch.autograd.grad(product.sum(), [first, second], allow_unused=True)
    assert found[1] is None
    return [found[0]]


def test_a_product_that_nobody_reads_has_no_gradient(tmp_path: Path) -> None:
    tokens, weights = whole_case(2)
    wanted = tokens.sum(0).expand_as(weights[0])
    for (found,) in run_forked(2, tmp_path, one_product_read):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def row_gradients(rank: int, ranks: int) -> list[torch.Tensor]:
    """This rank's share of the sum, and gradients of its inputs and weight."""
    inputs, weight = row_case(rank, ranks)
    share = multiply_and_scatter(inputs, weight, dist.group.WORLD)
    return [share, *torch.autograd.grad((rank + 1) * share.square().sum(), [inputs, weight])]


def row_case(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's features of all tokens [T, I] and its weight [O, I]."""
    torch.manual_seed(rank)
    inputs = torch.randn(ranks * TOKENS, INPUTS, dtype=torch.float64, requires_grad=True)
    return inputs, torch.randn(4, INPUTS, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("ranks", [2, 3])
def test_products_are_summed_and_dealt_out(ranks: int, tmp_path: Path) -> None:
    results = run_forked(ranks, tmp_path, row_gradients, ranks)

    cases = [row_case(rank, ranks) for rank in range(ranks)]
    total = torch.stack([inputs @ weight.T for inputs, weight in cases]).sum(0)
    factors = torch.arange(1, ranks + 1).repeat_interleave(TOKENS)[:, None]
    (factors * total.square()).sum().backward()
    for rank, (share, of_inputs, of_weight) in enumerate(results):
        inputs, weight = cases[rank]
        torch.testing.assert_close(share, total.chunk(ranks)[rank], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(of_inputs, inputs.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(of_weight, weight.grad, rtol=1e-12, atol=1e-12)


LATE = 1.0


def gap_between_products(rank: int) -> float:
    """Seconds between the two products of a rank, when the other one comes late."""
    share, matrix = torch.randn(TOKENS, INPUTS), torch.randn(INPUTS, 4)
    gather_multiply(share, [matrix], dist.group.WORLD.group_name, 2)
    dist.barrier()
    if rank == 1:
        time.sleep(LATE)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        gather_multiply(share, [matrix], dist.group.WORLD.group_name, 2)
    first, second = sorted(
        event.time_range.start for event in found.events() if event.name == "aten::mm"
    )
    return float(second - first) / 1e6


def test_own_tokens_are_multiplied_before_others_arrive(tmp_path: Path) -> None:
    early, _ = run_forked(2, tmp_path, gap_between_products)
    assert early > LATE / 2


def test_the_compiler_knows_what_a_product_costs(tmp_path: Path) -> None:
    counts = run_forked(2, tmp_path, counted_work)
    both_ways = 2 * 2 * TOKENS * INPUTS * sum(OUTPUTS)
    assert counts == [3 * both_ways] * 2


def counted_work(rank: int) -> int:
    """Floating-point operations of a forward and a backward pass."""
    tokens, weights = whole_case(2)
    share = tokens.chunk(2)[rank].clone().requires_grad_()
    for weight in weights:
        weight.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        _, *products = gather_and_multiply(share, weights, dist.group.WORLD)
        torch.stack([product.sum() for product in products]).sum().backward()
    return counter.get_total_flops()


def exchanges_of_a_step(rank: int, recipe: Recipe) -> Counter[str]:
    """The collectives of one step, and the products that exchange on their own."""
    plan = ParallelPlan(tp=2, sequence_parallel=True, overlaps=True)
    engine = assemble(recipe, source_of(recipe), build_mesh(plan, torch.device("cpu")))
    with Exchanges() as exchanges:
        micro_batch_loss(engine, batch(), 0).backward()
    return exchanges.counts


def test_every_split_linear_of_a_block_overlaps(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    recipe = with_mesh(tiny_recipe(rows, "llama", async_tensor_parallel=True), (1, 1, 1, 2))

    for counts in run_forked(2, tmp_path, exchanges_of_a_step, recipe):
        # forward before attention and MLP; backward behind their exits
        assert counts["gather_multiply"] == 4 * LAYERS
        assert counts["multiply_scatter"] == 2 * LAYERS
        assert counts["gathered_gradients"] == 2 * LAYERS
        # embedding and head remain
        assert counts["all_gather_into_tensor"] == counts["reduce_scatter_tensor"] == 2


KINDS: dict[str, dict[str, Any]] = {
    "packed": {"sample_packing": True, "micro_batch_size": 2},
    "lora": {"adapter": "lora", "lora_r": 4, "lora_target_linear": True, "lora_dropout": 0.2},
    "dora": {"adapter": "lora", "lora_r": 4, "lora_target_linear": True, "peft_use_dora": True},
    "tiled": {"tiled_mlp": True, "tiled_mlp_num_shards": 3},
    "recomputed": {"gradient_checkpointing": True},
    "attention kept": {"gradient_checkpointing": "attention"},
}
MESHES: tuple[Mesh, ...] = ((1, 1, 1, 2), (1, 1, 1, 4), (1, 2, 1, 2), (1, 1, 2, 2), (2, 1, 1, 2))


def compare(
    folder: Path, architecture: str, keys: dict[str, Any], meshes: Sequence[Mesh], **more: Any
) -> None:
    """Each mesh against one process, with which nothing travels."""
    alone = tiny_recipe(write_rows(folder / "rows.jsonl"), architecture, **keys)
    (reference,) = trace_cells([alone], folder)
    for group in by_world_size(meshes).values():
        cells = [with_mesh(alone, mesh, async_tensor_parallel=True, **more) for mesh in group]
        for mesh, trace in zip(group, trace_cells(cells, folder), strict=True):
            assert_same(trace, reference, mesh)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_mesh_that_overlaps_changes_nothing(architecture: str, tmp_path: Path) -> None:
    compare(tmp_path, architecture, KINDS["packed"], [(1, 1, 1, 2), (1, 1, 2, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_training_is_changed(kind: str, tmp_path: Path) -> None:
    compare(tmp_path, "llama", KINDS[kind], MESHES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "glm4"]
)
def test_no_architecture_is_changed(architecture: str, tmp_path: Path) -> None:
    compare(tmp_path, architecture, {}, [(1, 1, 1, 2), (1, 1, 1, 4)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "lora", "tiled", "recomputed"])
def test_compiled_blocks_overlap_too(kind: str, tmp_path: Path) -> None:
    compare(tmp_path, "llama", KINDS[kind], [(1, 1, 1, 2)], torch_compile=True)


def test_more_ranks_than_key_value_heads(tmp_path: Path) -> None:
    sizes = {"num_key_value_heads": 1}
    compare(tmp_path, "llama", {"sizes": sizes}, [(1, 1, 1, 2)])


@pytest.mark.parametrize(
    "keys",
    [
        # an adapter may be wider than what it is added to
        {"adapter": "lora", "lora_r": 80, "lora_target_linear": True},
        # without equal parts the ranks would compile different blocks
        pytest.param(
            {"sizes": {"intermediate_size": 93}, "torch_compile": True}, marks=pytest.mark.slow
        ),
    ],
)
def test_odd_widths_change_nothing(keys: dict[str, Any], tmp_path: Path) -> None:
    compare(tmp_path, "llama", keys, [(1, 1, 1, 2)])


def left_behind(rank: int, recipe: Recipe) -> list[bool]:
    """Whether linears still hold what was gathered for them when the backward pass is over."""
    plan = ParallelPlan(tp=2, sequence_parallel=True, overlaps=True)
    engine = assemble(recipe, source_of(recipe), build_mesh(plan, torch.device("cpu")))
    micro_batch_loss(engine, batch(), 0).backward()
    modules = engine.causal_lm.modules()
    columns = [module for module in modules if isinstance(module, ColumnLinear)]
    return [column.ahead is not None and column.ahead.holds for column in columns]


@pytest.mark.parametrize("policy", [False, True, "attention"])
def test_a_block_that_was_recomputed_holds_nothing(policy: bool | str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    keys = {"gradient_checkpointing": policy, "async_tensor_parallel": True}
    recipe = with_mesh(tiny_recipe(rows, "llama", **keys), (1, 1, 1, 2))

    for held in run_forked(2, tmp_path, left_behind, recipe):
        assert len(held) == 5 * LAYERS
        assert not any(held)
