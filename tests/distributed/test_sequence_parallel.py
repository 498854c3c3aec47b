"""Ranks that share matrices share the tokens between attention and MLP, and change no number."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import run_forked
from mesh_cells import (
    assert_same,
    source_of,
    tiny_recipe,
    trace_cells,
    with_mesh,
    write_rows,
)
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode

from ndtrain.data.batch import MicroBatch
from ndtrain.parallel.mesh import build_mesh
from ndtrain.parallel.sequence import gather_input
from ndtrain.plan.plan import ParallelPlan
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import assemble
from ndtrain.train.step import micro_batch_loss

ROWS, LENGTH, HIDDEN, LAYERS = 2, 12, 64, 2


class Exchanges(TorchDispatchMode):
    """Counts the collectives that a compiled block could hold, and our own operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func.namespace in ("_c10d_functional", "ndtrain"):
            self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def batch() -> MicroBatch:
    ids = 3 + torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7 % 90
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    return MicroBatch(ids, ids.roll(-1, 1), positions, torch.zeros_like(ids), torch.arange(ROWS))


def shapes_and_exchanges(
    rank: int, recipe: Recipe, plan: ParallelPlan
) -> tuple[dict[str, Any], Counter[str], int]:
    """Shapes of what modules read, the collectives of a step, and the summed gradients."""
    engine = assemble(recipe, source_of(recipe), build_mesh(plan, torch.device("cpu")))
    read: dict[str, Any] = {}
    for name, module in engine.causal_lm.named_modules():
        if name.endswith(("_proj", "norm", "lm_head")):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: read.update({name: tuple(inputs[0].shape)})
            )
    with Exchanges() as exchanges:
        micro_batch_loss(engine, batch(), 0).backward()
    return read, exchanges.counts, len(engine.partial)


def test_only_attention_and_mlp_see_the_tokens_of_other_ranks(tmp_path: Path) -> None:
    recipe = with_mesh(tiny_recipe(write_rows(tmp_path / "rows.jsonl"), "llama"), (1, 1, 1, 2))
    whole, share = (ROWS, LENGTH, HIDDEN), (1, ROWS * LENGTH // 2, HIDDEN)
    plan = ParallelPlan(tp=2, sequence_parallel=True)

    for read, exchanges, summed in run_forked(2, tmp_path, shapes_and_exchanges, recipe, plan):
        assert read["model.norm"] == share
        for layer in range(LAYERS):
            start = f"model.layers.{layer}"
            assert read[f"{start}.input_layernorm"] == share
            assert read[f"{start}.post_attention_layernorm"] == share
            assert read[f"{start}.self_attn.q_proj"] == whole
            assert read[f"{start}.mlp.up_proj"] == (1, ROWS * LENGTH, HIDDEN)
        assert summed == 2 * LAYERS + 1  # the norms
        # attention and MLP in both directions, embedding and head in one; the loss has two more
        assert exchanges["all_gather_into_tensor"] == 4 * LAYERS + 2
        assert exchanges["reduce_scatter_tensor"] == 4 * LAYERS + 2
        assert exchanges["all_reduce"] == 2


def test_without_it_every_rank_has_every_token(tmp_path: Path) -> None:
    recipe = with_mesh(tiny_recipe(write_rows(tmp_path / "rows.jsonl"), "llama"), (1, 1, 1, 2))

    results = run_forked(2, tmp_path, shapes_and_exchanges, recipe, ParallelPlan(tp=2))

    for read, exchanges, summed in results:
        assert {read[name] for name in read if name.endswith("norm")} == {(ROWS, LENGTH, HIDDEN)}
        assert summed == exchanges["all_gather_into_tensor"] == 0
        assert exchanges["reduce_scatter_tensor"] == 0


def kept_and_gathered(rank: int) -> tuple[set[int], int, list[list[torch.Tensor]]]:
    """Elements that a compiled module keeps, gathers of its backward pass, and gradients.

    The gradients are those of the module as it is, and compiled.
    """
    kept: set[int] = set()
    gathers: list[int] = []

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        options["compiler"] = "inductor"
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        outputs = forward.graph.output_node().args[0][options["num_fwd_outputs"] :]
        values = [node.meta.get("val") for node in outputs if isinstance(node, fx.Node)]
        kept.update(one.numel() for one in values if isinstance(one, torch.Tensor))
        gathers.append(sum("all_gather" in str(node.target) for node in backward.graph.nodes))
        return forward, backward

    linear = nn.Linear(HIDDEN, 3)
    gather_input(linear, dist.group.WORLD)
    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition)
    compiled = torch.compile(linear, backend=backend, fullgraph=True, dynamic=False)
    share = torch.randn(1, 10, HIDDEN, requires_grad=True)
    gradients = []
    for module in (linear, compiled):
        loss = module(share.sin()).square().sum()
        gradients.append(list(torch.autograd.grad(loss, [share, linear.weight])))
    return kept, gathers[0], gradients


def test_a_compiled_module_keeps_its_share_and_gathers_it_again(tmp_path: Path) -> None:
    for kept, gathers, (plain, compiled) in run_forked(2, tmp_path, kept_and_gathered):
        assert 20 * HIDDEN not in kept
        assert 10 * HIDDEN in kept
        assert gathers == 1
        for one, other in zip(plain, compiled, strict=True):
            assert torch.equal(one, other)


def test_dropout_between_attention_and_mlp_follows_the_token(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", longest=7)
    keys = {"sequence_len": 7, "pad_to_multiple_of": 1, "micro_batch_size": 2}
    alone = tiny_recipe(rows, "phi3", sizes={"resid_pdrop": 0.3}, **keys)
    reference, plain = trace_cells(
        [alone, tiny_recipe(rows, "phi3", sizes={"resid_pdrop": 0.0}, **keys)], tmp_path
    )
    assert abs(reference.losses[0] - plain.losses[0]) > 1e-3
    (trace,) = trace_cells([with_mesh(alone, (1, 1, 1, 2))], tmp_path)
    assert_same(trace, reference, "tp 2")


COMPILED: dict[str, dict[str, Any]] = {
    "budget": {},
    "full": {"gradient_checkpointing": "full"},
    "lora": {"adapter": "lora", "lora_r": 4, "lora_dropout": 0.2},
    "whole tokens": {"tensor_sequence_parallel": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_blocks_with_shared_tokens_change_nothing(kind: str, tmp_path: Path) -> None:
    keys = {"sample_packing": True, "micro_batch_size": 2, **COMPILED[kind]}
    alone = tiny_recipe(write_rows(tmp_path / "rows.jsonl"), "llama", **keys)
    (reference,) = trace_cells([alone], tmp_path)
    (trace,) = trace_cells([with_mesh(alone, (1, 1, 1, 2), torch_compile=True)], tmp_path)
    assert_same(trace, reference, kind)
