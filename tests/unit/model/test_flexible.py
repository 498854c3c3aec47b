"""Shaped attention through blocks: the values of the written-out one.

Torch has no backward pass of it on CPU; `benchmarks/gpu_check.py` holds whole losses on CUDA.
"""

from typing import Any

import pytest
import torch
from torch import nn

from ndtrain.model.attention import attention, block_windows, describe_attention, use_attention
from ndtrain.model.build import build_model
from ndtrain.model.weights import load_weights
from ndtrain.parallel.context import AttentionRows, SequenceSplit
from ndtrain.plan.model_source import find_model
from ndtrain.recipe.schema import Recipe

LENGTH, HEADS, KV_HEADS, FEATURES = 200, 4, 2, 8


def rows(packed: bool) -> AttentionRows:
    documents = torch.zeros(2, LENGTH, dtype=torch.long)
    if packed:
        documents[0, 70:] = 1
        documents[1, 130:] = 1
        documents[1, 190:] = 2
    columns = torch.arange(LENGTH)
    return AttentionRows(SequenceSplit(), columns, columns, documents, documents, not packed)


@torch.no_grad()
def output(where: AttentionRows, **keys: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = draw(2, HEADS, LENGTH, FEATURES)
    key, value = draw(2, KV_HEADS, LENGTH, FEATURES), draw(2, KV_HEADS, LENGTH, FEATURES)
    if keys.pop("sinks", False):
        keys["s_aux"] = draw(HEADS)
    return attention(nn.Module(), query, key, value, None, rows=where, **keys)[0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    "keys",
    [{"softcap": 2.0}, {"sinks": True}, {"softcap": 1.5, "sinks": True, "scaling": 0.2}, {}],
    ids=["cap", "sinks", "both", "plain scores"],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_blocks_give_what_the_mask_gives(
    packed: bool, window: int | None, keys: dict[str, Any]
) -> None:
    where = rows(packed)
    written_out = output(where, sliding_window=window, **keys)
    by_blocks = output(where.with_blocks([None, window]), sliding_window=window, **keys)
    torch.testing.assert_close(by_blocks, written_out, rtol=1e-4, atol=1e-6)


def test_which_models_want_blocks() -> None:
    def windows(model_type: str, *, fused: bool = True, **sizes: Any) -> tuple[int | None, ...]:
        small = {
            "head_dim": 16,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        recipe = Recipe(model_config={"model_type": model_type, **small, **sizes}, learning_rate=1)
        model = build_model(find_model(recipe), recipe, dtype=torch.float32)
        return block_windows(model.config, fused=fused)

    assert windows("llama") == ()
    assert windows("llama", fused=False, head_dim=8) == (), "no kernel is that narrow"
    assert windows("llama", fused=False) == (None,)
    assert windows("mistral", sliding_window=8) == ()
    assert windows("gemma2", sliding_window=8) == (None, 8)
    assert windows("gemma3_text", sliding_window=8) == ()
    assert windows("gpt_oss", sliding_window=8, num_local_experts=2) == (None, 8)


def test_a_compiled_block_takes_the_blocks_of_every_batch() -> None:
    torch._dynamo.reset()
    sizes = {
        "model_type": "gemma2",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "vocab_size": 64,
        "sliding_window": 40,
    }
    recipe = Recipe(model_config=sizes, learning_rate=1)
    source = find_model(recipe)
    model = build_model(source, recipe, dtype=torch.float32)
    load_weights(model, source, seed=1, device=torch.device("cpu"))
    use_attention(model)
    model.eval()
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 64
    batches = [rows(packed=True), rows(packed=False)]
    with torch.no_grad():
        expected = [model(input_ids=ids, rows=one, use_cache=False).logits for one in batches]
        for block in model.model.layers:
            # traced as on CUDA, without the minutes that a compiler for the CPU takes
            block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
        for one, logits in zip(batches, expected, strict=True):
            blocks = one.with_blocks(block_windows(model.config, fused=True))
            found = model(input_ids=ids, rows=blocks, use_cache=False).logits
            torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)


def test_the_kernels_are_named() -> None:
    assert "cuDNN" in describe_attention(fused=True, windows=())
    assert "variable length" in describe_attention(fused=True, windows=())
    assert "FlexAttention: this model" in describe_attention(fused=True, windows=(None,))
    assert "a mask of all pairs for packed" in describe_attention(fused=False, windows=())
    assert "FlexAttention for packed" in describe_attention(fused=False, windows=(None,))
