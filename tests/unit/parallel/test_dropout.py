"""Dropout by place: the share it drops, its independence of numbering, and what a compiler sees."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ndtrain.parallel.dropout import DropoutKeys, MeshDropout

CPU = torch.device("cpu")


def prepared(width: int = 64) -> DropoutKeys:
    keys = DropoutKeys()
    keys.prepare(width, CPU)
    keys.set(42, 3, torch.tensor([5, 9]), torch.arange(50))
    return keys


def drop(keys: DropoutKeys, number: int = 1, first: int = 0, p: float = 0.25) -> MeshDropout:
    return MeshDropout(p, torch.tensor(number), keys, first)


def test_a_quarter_is_dropped_and_the_rest_scaled() -> None:
    out = drop(prepared())(torch.ones(2, 50, 64))
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((out == 0).float().mean().item() - 0.25) < 0.02


def test_a_rank_that_holds_some_features_drops_what_one_process_does() -> None:
    keys = prepared()
    whole = drop(keys)(torch.ones(2, 50, 64))
    for first in (0, 16, 48):
        part = drop(keys, first=first)(torch.ones(2, 50, 16))
        assert torch.equal(part, whole[..., first : first + 16])


def test_modules_steps_and_rows_drop_other_elements() -> None:
    keys = prepared()
    ones = torch.ones(2, 50, 64)
    base = drop(keys)(ones)
    assert not torch.equal(base[0], base[1])
    assert not torch.equal(drop(keys, number=2)(ones), base)
    keys.set(42, 4, torch.tensor([5, 9]), torch.arange(50))
    assert not torch.equal(drop(keys)(ones), base)
    keys.set(42, 3, torch.tensor([5, 9]), torch.arange(50))
    assert torch.equal(drop(keys)(ones), base)


def test_blocks_share_one_graph_without_places_of_its_own() -> None:
    """One for each of 32 takes minutes, and Triton adds no constant of 64 bits to a place."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    keys = prepared()
    blocks = [nn.Sequential(nn.Linear(64, 64), drop(keys, number)) for number in range(1, 13)]
    ones = torch.ones(2, 50, 64)
    for block in blocks:
        wanted = block(ones)
        found = torch.compile(block.forward, fullgraph=True, backend=backend)(ones)
        torch.testing.assert_close(found, wanted)
    assert len(graphs) == 1
    assert not [node for node in graphs[0].graph.nodes if "arange" in str(node.target)]
