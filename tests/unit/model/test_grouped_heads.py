"""Layers that differ in heads compile as one code, whole rows and packed ones."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from ndtrain.model.attention import attention
from ndtrain.parallel.context import AttentionRows, SequenceSplit
from ndtrain.parallel.recompute import apply_compile

HIDDEN, LENGTH, FEATURES = 24, 12, 4
HEADS = [(6, 3), (6, 2), (3, 3), (4, 1), (6, 6)]
"""Query and key/value heads of each layer."""


class Layer(nn.Module):
    """Attention with plain tensors for weights, as gathered shards are: of no fixed size."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        shapes = [(heads * FEATURES, HIDDEN), (kv_heads * FEATURES, HIDDEN)]
        shapes.append((HIDDEN, heads * FEATURES))
        self.weights = [torch.randn(shape) / HIDDEN**0.5 for shape in shapes]

    def forward(self, hidden: torch.Tensor, rows: AttentionRows) -> torch.Tensor:
        query, key = (
            nn.functional.linear(hidden, weight).view(2, LENGTH, -1, FEATURES).transpose(1, 2)
            for weight in self.weights[:2]
        )
        mixed = attention(self, query, key, key, None, rows=rows)[0].flatten(2)
        return hidden + nn.functional.linear(mixed, self.weights[2])


def gradients(layers: Sequence[Layer], rows: AttentionRows) -> list[torch.Tensor]:
    hidden = torch.linspace(-1, 1, 2 * LENGTH * HIDDEN).reshape(2, LENGTH, HIDDEN)
    weights = [weight.requires_grad_() for layer in layers for weight in layer.weights]
    for layer in layers:
        hidden = layer(hidden, rows=rows)
    return list(torch.autograd.grad(hidden.square().sum(), weights))


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.usefixtures("compiler_backend")
def test_layers_that_differ_in_heads_compile(packed: bool) -> None:
    torch.manual_seed(0)
    documents = torch.zeros(2, LENGTH, dtype=torch.long)
    if packed:
        documents[:, 5:] = 1
    columns = torch.arange(LENGTH)
    rows = AttentionRows(SequenceSplit(), columns, columns, documents, documents, not packed)
    layers = [Layer(*heads) for heads in HEADS]
    expected = gradients(layers, rows)
    apply_compile(layers, budget=0.9)
    for found, wanted in zip(gradients(layers, rows), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
