"""Documents of one packed row never see each other, to the last bit, on meshes that split rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from mesh_cells import source_of, tiny_recipe, with_mesh

from ndtrain.data.batch import IGNORED, MicroBatch
from ndtrain.parallel.mesh import build_mesh
from ndtrain.plan.plan import ParallelPlan
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import Engine, assemble
from ndtrain.train.step import micro_batch_loss

LENGTHS = (11, 9, 12)
"""Documents of the row; none starts where a rank's part does."""

MESHES = {
    1: [ParallelPlan()],
    2: [
        ParallelPlan(cp=2, cp_method="ulysses"),
        ParallelPlan(cp=2, cp_method="allgather"),
        ParallelPlan(tp=2),
    ],
    4: [
        ParallelPlan(cp=4, cp_method="ulysses"),
        ParallelPlan(cp=4, cp_method="allgather"),
        ParallelPlan(dp_shard=2, cp=2, cp_method="ulysses"),
        ParallelPlan(cp=2, tp=2, cp_method="allgather"),
    ],
}


def packed_row(changed: int | None) -> MicroBatch:
    """Three documents, the first token of one of them changed."""
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    ids = 3 + torch.arange(sum(LENGTHS)) * 7 % 90
    targets = torch.roll(ids, -1)
    targets[documents != torch.roll(documents, -1)] = IGNORED
    targets[-1] = IGNORED
    if changed is not None:
        ids[sum(LENGTHS[:changed])] = 2
    row = (tensor[None] for tensor in (ids, targets, positions, documents))
    return MicroBatch(*row, row_ids=torch.zeros(1, dtype=torch.long))


@torch.no_grad()
def hidden_states(engine: Engine, changed: int | None) -> torch.Tensor:
    """What the head reads, at this rank's places of the row [L, H]."""
    seen: list[torch.Tensor] = []
    hook = engine.causal_lm.base_model.register_forward_hook(
        lambda module, inputs, output: seen.append(output.last_hidden_state[0].clone())
    )
    micro_batch_loss(engine, packed_row(changed), 0)
    hook.remove()
    return seen[0]


def moved(rank: int, recipe: Recipe, plans: list[ParallelPlan]) -> list[list[set[int]]]:
    """For each mesh and each changed document: documents whose states moved on this rank."""
    found = []
    for plan in plans:
        mesh = build_mesh(plan, torch.device("cpu"))
        engine = assemble(recipe, source_of(recipe), mesh)
        engine.trainable.eval()
        length = sum(LENGTHS)
        columns = engine.split.columns(length, engine.split.rank, torch.device("cpu"))
        documents = packed_row(None).documents[0][columns]
        before = hidden_states(engine, None)
        found.append(
            [
                set(documents[(hidden_states(engine, changed) != before).any(1)].tolist())
                for changed in range(len(LENGTHS))
            ]
        )
    return found


@pytest.mark.parametrize("world_size", MESHES)
@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("llama", {}),
        ("qwen3", {}),
        # the window reaches over the ends of documents
        ("gemma3_text", {"sliding_window": 16}),
    ],
)
def test_changing_a_document_moves_no_other(
    architecture: str, sizes: dict[str, Any], world_size: int, tmp_path: Path
) -> None:
    recipe = with_mesh(
        tiny_recipe(tmp_path / "unread.jsonl", architecture, sizes=sizes, sample_packing=True),
        (1, 1, 1, 1),
    )
    plans = MESHES[world_size]
    ranks = run_forked(world_size, tmp_path, moved, recipe, plans)
    for number, plan in enumerate(plans):
        for changed in range(len(LENGTHS)):
            everywhere = set().union(*(rank[number][changed] for rank in ranks))
            assert everywhere == {changed}, plan
