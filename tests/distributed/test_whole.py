"""Tensors of two axes on one dim that does not divide: gathered and split exactly, in silence."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from test_load_weights import SIZES, random_recipe, sharded_model
from torch.distributed.tensor import DTensor, Replicate, Shard

from ndtrain.model.regions import local_region, take_region
from ndtrain.model.whole import whole_of
from ndtrain.plan.plan import ParallelPlan
from ndtrain.train.checkpoint_state import as_blocks, copy_from_blocks, is_scattered

# 50 is 25 and 25 over tp, then 13, 12, 13 and 12; 99 is worse.
UNEVEN = {"model_type": "qwen3", **SIZES}


class Heard(logging.Handler):
    """Keeps what torch says of its redistributions."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def carry(_: int, config: dict[str, Any], plan: ParallelPlan) -> dict[str, Any]:
    """What one rank found of a whole model, and what torch said."""
    heard = Heard()
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    logger.addHandler(heard)
    model = sharded_model(random_recipe(config), plan)
    tensors = {name: one.detach() for name, one in model.named_parameters()}
    wholes = {name: whole_of(one).clone() for name, one in tensors.items()}
    blocks = as_blocks(tensors)
    wrong = []
    for name, block in blocks.items():
        plain = [
            place if isinstance(place, Replicate) else Shard(place.dim)
            for place in block.placements
        ]
        mesh = block.device_mesh
        region = local_region(block.shape, plain, mesh.shape, mesh.get_coordinate())
        part, own = take_region(wholes[name], region), block.to_local()
        if is_scattered(tensors[name]) and not (
            own.numel() == 0 if part is None else torch.equal(own, part)
        ):
            wrong.append(name)
    for one in tensors.values():
        if is_scattered(one):
            one.to_local().zero_()
    copy_from_blocks(tensors, blocks)
    again = {name: whole_of(one) for name, one in tensors.items()}
    wrong += [name for name, one in again.items() if not torch.equal(one, wholes[name])]
    scattered = sorted(name for name, one in tensors.items() if is_scattered(one))
    logger.removeHandler(heard)
    return {"wholes": wholes, "wrong": wrong, "scattered": scattered, "said": heard.messages}


def test_every_rank_gets_the_whole_and_its_block(tmp_path: Path) -> None:
    (one,) = run_forked(1, tmp_path, carry, UNEVEN, ParallelPlan())
    ranks = run_forked(4, tmp_path, carry, UNEVEN, ParallelPlan(dp_shard=2, tp=2))
    names = {name.rsplit(".", 2)[-2] for name in ranks[0]["scattered"]}
    assert names >= {"gate_proj", "up_proj", "embed_tokens"}
    for rank in ranks:
        assert rank["wrong"] == []
        assert rank["said"] == []
        for name, whole in one["wholes"].items():
            assert torch.equal(rank["wholes"][name], whole), name


def full_tensors(_: int, config: dict[str, Any]) -> list[str]:
    """What torch says where its own gather is used."""
    heard = Heard()
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    logger.addHandler(heard)
    model = sharded_model(random_recipe(config), ParallelPlan(dp_shard=2, tp=2))
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter.full_tensor()
    logger.removeHandler(heard)
    return heard.messages


def test_what_torch_says_would_be_heard(tmp_path: Path) -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("this torch gathers axis by axis without a word")
    assert all(
        "sequential all_gather" in said[0] for said in run_forked(4, tmp_path, full_tensors, UNEVEN)
    )
