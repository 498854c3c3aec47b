"""What saves memory leaves the steps as they are: exactly, or within the bits it takes away."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_forked
from mesh_cells import tiny_recipe, trace_cells, with_mesh, write_rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.profiler import profile

from ndtrain.recipe.schema import Recipe
from ndtrain.train.cells import Trace
from ndtrain.train.low_bit_adam import LowBitAdamW

Mesh = tuple[int, int, int, int]
ONE: Mesh = (1, 1, 1, 1)
PAIRS: tuple[Mesh, ...] = ((1, 2, 1, 1), (2, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2))

# large enough for blocks of 16 that share a scale, also over 2 tensor-parallel ranks
WIDE = {"hidden_size": 128, "intermediate_size": 256}

EXACT: dict[str, dict[str, Any]] = {
    "offloading": {"gradient_checkpointing": True, "activation_offloading": True},
    "in backward": {"optimizer_in_backward": True},
    "both": {
        "gradient_checkpointing": True,
        "activation_offloading": True,
        "optimizer_in_backward": True,
    },
}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


def on(recipe: Recipe, mesh: Mesh) -> Recipe:
    """The recipe on a mesh, all its rows in one pass."""
    return with_mesh(recipe, mesh, micro_batch_size=8 // (mesh[0] * mesh[1]))


def assert_equal(trace: Trace, reference: Trace, what: object) -> None:
    assert trace.losses == reference.losses, what
    assert trace.grad_norms == reference.grad_norms, what
    for name, parameter in reference.parameters.items():
        assert torch.equal(trace.parameters[name], parameter), f"{what} {name}"


def check_exact(
    rows: Path, folder: Path, meshes: Sequence[Mesh], *, architecture: str = "llama", **keys: Any
) -> None:
    plain = tiny_recipe(rows, architecture, max_grad_norm=None, **keys)
    changed = [plain.model_copy(update=options) for options in EXACT.values()]
    for mesh in meshes:
        cells = [on(recipe, mesh) for recipe in (plain, *changed)]
        reference, *traces = trace_cells(cells, folder)
        for name, trace in zip(EXACT, traces, strict=True):
            assert_equal(trace, reference, (name, mesh))


@pytest.mark.parametrize("meshes", [(ONE,), pytest.param(PAIRS, marks=pytest.mark.slow)])
def test_offloading_and_early_steps_change_nothing(
    rows: Path, tmp_path: Path, meshes: tuple[Mesh, ...]
) -> None:
    check_exact(rows, tmp_path, meshes)


def test_gradients_that_are_summed_over_tp_are_stepped_after_the_pass(
    rows: Path, tmp_path: Path
) -> None:
    """More ranks than key/value heads: k and v are whole on each, their gradients parts."""
    check_exact(rows, tmp_path, ((1, 1, 1, 4),), sizes={"num_key_value_heads": 2})


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch", "rmsprop"])
def test_any_optimizer_steps_in_the_backward_pass(
    rows: Path, tmp_path: Path, optimizer: str
) -> None:
    check_exact(rows, tmp_path, (ONE,), optimizer=optimizer)


@pytest.mark.parametrize(
    "keys",
    [
        {"bf16": True},
        {"sizes": {"tie_word_embeddings": True}},
        {"architecture": "qwen3_moe"},
    ],
    ids=["cast", "tied", "experts"],
)
def test_one_rank_steps_its_own_shards_in_the_backward_pass(
    rows: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    """Weights move while the pass goes on; some experts see no token, and get no gradient."""
    check_exact(rows, tmp_path, (ONE,), **keys)


def test_early_steps_and_offloading_with_states_in_few_bits(rows: Path, tmp_path: Path) -> None:
    keys = {"param_dtype": "bf16", "optimizer_state_dtype": "8bit", "sizes": WIDE}
    check_exact(rows, tmp_path, (ONE, (1, 2, 1, 1)), **keys)


def test_an_adapter_is_stepped_in_the_backward_pass(rows: Path, tmp_path: Path) -> None:
    lora = {"adapter": "lora", "lora_r": 4, "lora_target_linear": True, "lora_dropout": 0.2}
    check_exact(rows, tmp_path, (ONE, (1, 1, 1, 2)), **lora)


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_states_in_few_bits_are_the_same_on_a_mesh(rows: Path, tmp_path: Path, states: str) -> None:
    """Rounding flips where a gradient's own rounding crosses a chance: in few elements."""
    recipe = tiny_recipe(rows, "llama", optimizer_state_dtype=states, sizes=WIDE)
    reference = trace_cells([on(recipe, ONE)], tmp_path)[0]
    for mesh, trace in zip(
        PAIRS, trace_cells([on(recipe, mesh) for mesh in PAIRS], tmp_path), strict=True
    ):
        np.testing.assert_allclose(trace.losses, reference.losses, rtol=1e-5, err_msg=str(mesh))
        np.testing.assert_allclose(trace.grad_norms, reference.grad_norms, rtol=1e-4)
        apart = torch.cat(
            [
                (trace.parameters[name] - parameter).abs().flatten()
                for name, parameter in reference.parameters.items()
            ]
        )
        assert (apart > 1e-4).float().mean() < 1e-3, mesh
        assert apart.max() < recipe.learning_rate, mesh


def test_bf16_weights_are_the_same_on_a_mesh_up_to_their_own_spacing(
    rows: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(
        rows, "llama", param_dtype="bf16", optimizer_state_dtype="bf16", sizes=WIDE
    )
    reference = trace_cells([on(recipe, ONE)], tmp_path)[0]
    for mesh, trace in zip(
        PAIRS, trace_cells([on(recipe, mesh) for mesh in PAIRS], tmp_path), strict=True
    ):
        np.testing.assert_allclose(trace.losses, reference.losses, rtol=2e-4, err_msg=str(mesh))
        for name, parameter in reference.parameters.items():
            apart = (trace.parameters[name].float() - parameter.float()).abs()
            assert (apart > 0).float().mean() < 0.05, (mesh, name)
            # where a gradient is all rounding, Adam makes a step of it
            bound = 2**-6 * parameter.float().abs() + recipe.learning_rate
            assert torch.all(apart <= bound), (mesh, name)


def stepped(rank: int, kind: str, placed: str) -> dict[str, torch.Tensor]:
    """Weight and states after three steps with given gradients, whole; sharded as `placed`."""
    random = torch.Generator().manual_seed(7)
    whole = torch.randn(37, 64, generator=random).repeat(1, 4)
    gradients = [torch.randn(whole.shape, generator=random) * 10.0**-power for power in range(3)]
    placements = {"rows": [Shard(0)], "columns": [Shard(1)], "both": [Shard(0), Shard(1)]}
    shapes = {"rows": (4,), "columns": (4,), "both": (2, 2)}
    share = lambda tensor: tensor  # noqa: E731
    if placed != "whole":
        mesh = init_device_mesh("cpu", shapes[placed])
        share = partial(distribute_tensor, device_mesh=mesh, placements=placements[placed])
    dtype, states = kind.split("+")
    weight = torch.nn.Parameter(share(whole.to(getattr(torch, dtype))))
    group = {"params": [weight], "names": ["w"], "weight_decay": 0.1}
    adam = LowBitAdamW([group], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, state_dtype=states, seed=42)
    for gradient in gradients:
        weight.grad = share(gradient.to(weight.dtype))
        adam.step()
    found = {"weight": weight.detach(), **adam.state[weight]}
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in found.items()
    }


@pytest.mark.parametrize("kind", ["float32+bf16", "bfloat16+bf16", "bfloat16+8bit", "float32+8bit"])
def test_with_the_same_gradients_every_sharding_rounds_alike(kind: str, tmp_path: Path) -> None:
    """37 rows over 4 ranks: the last holds 7, and no shard starts at a round place."""
    (reference,) = run_forked(1, tmp_path, stepped, kind, "whole")
    for placed in ("rows", "columns", "both"):
        folder = tmp_path / placed
        folder.mkdir()
        for found in run_forked(4, folder, stepped, kind, placed):
            assert found.keys() == reference.keys()
            for name, value in reference.items():
                assert torch.equal(found[name], value), (placed, name)


def operators_of_a_step(rank: int) -> set[str]:
    """What the host does in a step over a shard, once the states are there."""
    mesh = init_device_mesh("cpu", (1,))
    shard = partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)])
    weight = torch.nn.Parameter(shard(torch.ones(8, 256)))
    group = {"params": [weight], "names": ["w"]}
    adam = LowBitAdamW([group], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, state_dtype="bf16", seed=1)
    for _ in range(2):
        weight.grad = shard(torch.ones(8, 256))
        with profile() as seen:
            adam.step()
    return {event.name for event in seen.events()}


def test_a_step_makes_no_views_of_what_it_updates(tmp_path: Path) -> None:
    """Those of four tensors a parameter cost the host as much as the update costs the device."""
    (operators,) = run_forked(1, tmp_path, operators_of_a_step)
    assert "Optimizer.step#LowBitAdamW.step" in operators
    assert "aten::detach" not in operators


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_8_bit_matmuls_round_alike_on_a_mesh(rows: Path, tmp_path: Path, kind: str) -> None:
    """Scales are powers of two: what a rank holds beside a value hardly moves its rounding."""
    recipe = tiny_recipe(rows, "llama", fp8=kind, sizes=WIDE)
    plain = recipe.model_copy(update={"fp8": False})
    alone, exact = trace_cells([on(recipe, ONE), on(plain, ONE)], tmp_path)
    # they do round: the losses are those of another arithmetic
    assert np.abs(np.divide(alone.losses, exact.losses) - 1).max() > 1e-3
    np.testing.assert_allclose(alone.losses, exact.losses, rtol=0.03)
    for mesh, trace in zip(
        PAIRS, trace_cells([on(recipe, mesh) for mesh in PAIRS], tmp_path), strict=True
    ):
        np.testing.assert_allclose(trace.losses[0], alone.losses[0], rtol=1e-6, err_msg=str(mesh))
        np.testing.assert_allclose(trace.grad_norms[0], alone.grad_norms[0], rtol=1e-4)
        # rows of gradients are cut by tp, and where they reach too far for their format some of
        # the tiny ones become zero, which Adam makes a step of
        cut = kind == "rowwise" and mesh[3] > 1
        np.testing.assert_allclose(trace.losses, alone.losses, rtol=0.02 if cut else 1e-5)
