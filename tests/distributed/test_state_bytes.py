"""The state bytes that planning states equal what the assembled engine holds, on every mesh.

A process of its own plays each rank over torch's fake process group: nothing is exchanged, and
every parameter, gradient and moment has the shape it has in a run.
"""

import gc
import itertools
import multiprocessing
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ndtrain.parallel.mesh import build_mesh
from ndtrain.plan.decide import decide
from ndtrain.plan.facts import facts_from_config
from ndtrain.plan.model_source import find_model
from ndtrain.plan.plan import ParallelPlan
from ndtrain.plan.setting import Precision
from ndtrain.plan.state_bytes import state_bytes
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import assemble

MODELS = {
    "llama, odd sizes": {
        "model_type": "llama",
        "hidden_size": 40,
        "intermediate_size": 50,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 321,
    },
    "qwen3, tied": {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "vocab_size": 320,
        "tie_word_embeddings": True,
    },
}
NINE_HEADS = {
    "model_type": "llama",
    "hidden_size": 72,
    "intermediate_size": 50,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 321,
}
QUICK = [(1, 1, 1, 1), (1, 1, 2, 2), (1, 1, 1, 4), (1, 3, 1, 1)]
REST = [*itertools.product((1, 2), repeat=4), (1, 4, 1, 1), (1, 1, 4, 1), (1, 2, 1, 4)]
SIZES = [
    *QUICK,
    *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in REST if sizes not in QUICK),
]


def held_bytes(config, sizes, rank):
    """Bytes of weights, gradients and moments of the engine on one rank."""
    keys = ("dp_replicate_size", "dp_shard_size", "context_parallel_size", "tensor_parallel_size")
    recipe = Recipe(
        model_config={"num_hidden_layers": 2, **config},
        tokenizer_config="bytes",
        learning_rate=1e-3,
        **dict(zip(keys, sizes, strict=True)),
    )
    source = find_model(recipe)
    facts = facts_from_config(source.config, name="tiny", source="recipe")
    plan = decide(recipe, facts).parallel
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    try:
        engine = assemble(recipe, source, build_mesh(plan, torch.device("cpu")))
        for parameter in engine.parameters:
            parameter.grad = torch.zeros_like(parameter)
        engine.optimizer.step()
        moments = [
            value
            for state in engine.optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        ]
        held = {
            "weights": total(engine.parameters),
            "gradients": total(parameter.grad for parameter in engine.parameters),
            "optimizer": total(moments),
        }
    finally:
        dist.destroy_process_group()
    return held, state_bytes(facts, plan, rank, Precision())


def total(tensors):
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def one_rank(config, sizes, rank, results):
    # process groups of earlier tests must not be destroyed here: their threads stayed behind
    gc.freeze()
    torch.set_num_threads(1)
    try:
        results.put(held_bytes(config, sizes, rank))
    except BaseException:
        results.put(traceback.format_exc())


def name(sizes):
    return "x".join(map(str, sizes))


@pytest.mark.parametrize("sizes", SIZES, ids=name)
@pytest.mark.parametrize("model", MODELS)
def test_state_bytes_are_what_torch_allocates(model, sizes):
    check(MODELS[model], sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 1, 3), (1, 2, 1, 3), (1, 3, 3, 1)], ids=name)
def test_state_bytes_of_nine_heads_over_three_ranks(sizes):
    check(NINE_HEADS, sizes)


def check(config, sizes):
    context = multiprocessing.get_context("fork")
    world = ParallelPlan(*sizes).world_size
    # The outermost axis repeats what the others hold. A fresh process for each rank: torch
    # remembers the coordinates of equal meshes.
    for rank in range(world // sizes[0]):
        gc.collect()
        results = context.SimpleQueue()
        child = context.Process(target=one_rank, args=(config, sizes, rank, results))
        child.start()
        result = results.get()
        child.join()
        assert not isinstance(result, str), result
        held, planned = result
        assert planned == held, f"rank {rank}"
