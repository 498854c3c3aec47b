"""A tiled MLP computes what the plain one does, keeps its input, and works twice."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ndtrain.errors import MeshError
from ndtrain.parallel.dropout import DropoutKeys, MeshDropout
from ndtrain.parallel.recompute import apply_recompute
from ndtrain.parallel.tiled import apply_tiled_mlp

HIDDEN, WIDTH, DEPTH = 8, 40, 4


class Mlp(nn.Module):
    """Counts the tokens of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, WIDTH)
        self.up = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, HIDDEN)
        self.drop: nn.Module = nn.Identity()
        self.calls: list[int] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls.append(hidden.shape[:-1].numel())
        wide = nn.functional.silu(self.gate(hidden)) * self.up(hidden)
        out: torch.Tensor = self.down(self.drop(wide))
        return out


class Block(nn.Module):
    def __init__(self, *, norms_after: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.mlp = Mlp()
        self.after: nn.Module = nn.RMSNorm(HIDDEN) if norms_after else nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + self.after(self.mlp(self.norm(hidden)))
        return out


class Scored(nn.Module):
    """A mixture's MLP that returns its router's scores as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(hidden), hidden.sum(-1)


def build(dtype: torch.dtype = torch.float64, **keys: Any) -> Block:
    torch.manual_seed(0)
    return Block(**keys).to(dtype)


def tiled(block: Block, shards: int | None = 3, keys: DropoutKeys | None = None) -> Block:
    apply_tiled_mlp([block], keys or DropoutKeys(), shards=shards, compiles=False)
    return block


def inputs(rows: int = 2, length: int = 13, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, length, HIDDEN, dtype=dtype, requires_grad=True)


def results(block: nn.Module, hidden: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """The output and every gradient."""
    block.zero_grad()
    out = block(hidden)
    hidden.grad = None
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    grads = {name: one.grad for name, one in block.named_parameters()}
    return {"output": out.detach(), "hidden": hidden.grad, **grads}


def assert_equal(
    found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]
) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(found[name], value, rtol=1e-13, atol=1e-13, msg=name)


@pytest.mark.parametrize(
    ("shards", "lengths"),
    [
        (None, [8, 8, 8, 2]),
        (1, [26]),
        (3, [9, 9, 8]),
        # as torch.chunk: so long that fewer are enough
        (20, [2] * 13),
        (1000, [1] * 26),
    ],
)
def test_slices_give_the_output_and_gradients_of_the_whole(
    shards: int | None, lengths: list[int]
) -> None:
    block = tiled(build(), shards)

    assert_equal(results(block, inputs()), results(build(), inputs()))
    # once forward, and once again in the backward pass
    assert block.mlp.calls == lengths + lengths


def test_a_frozen_mlp_and_an_input_without_gradient() -> None:
    for frozen in (("mlp",), ("norm",), ("mlp.gate", "mlp.up"), ("norm", "mlp.down")):
        blocks = [tiled(build()), build()]
        hidden = inputs().detach() if "norm" in frozen else inputs()
        for block in blocks:
            for name in frozen:
                block.get_submodule(name).requires_grad_(False)
        found, expected = (results(block, hidden) for block in blocks)
        assert_equal(found, expected)


def test_without_gradients_there_is_no_graph() -> None:
    block = tiled(build())
    with torch.no_grad():
        out = block(inputs())
    assert not out.requires_grad
    assert block.mlp.calls == [9, 9, 8]
    torch.testing.assert_close(out, build()(inputs()).detach(), rtol=1e-13, atol=1e-13)


def test_a_parameter_sees_one_gradient_a_pass() -> None:
    block, seen = tiled(build()), []
    for name, parameter in block.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    results(block, inputs())
    assert sorted(seen) == sorted(name for name, _ in block.named_parameters())


def test_gradients_add_up_over_passes() -> None:
    block, plain = tiled(build()), build()
    for one in (block, plain):
        for length in (5, 13):
            one(inputs(1, length)).square().sum().backward()
    for found, expected in zip(block.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-13, atol=1e-13)


def test_gradients_of_bf16_weights_are_summed_in_fp32() -> None:
    """Each slice's gradient is a bf16 number; their sum is rounded once."""
    block, hidden = tiled(build(torch.bfloat16), 1000), inputs(dtype=torch.bfloat16)
    found = results(block, hidden)["mlp.up.weight"]
    single = build(torch.bfloat16)
    normed = single.norm(hidden.detach()).flatten(0, 1)
    given = torch.linspace(-1, 1, normed.numel(), dtype=torch.bfloat16).view_as(normed)
    total = torch.zeros(WIDTH, HIDDEN)
    for token, gradient in zip(normed, given, strict=True):
        out = single.mlp(token[None, None])
        total += torch.autograd.grad(out, single.mlp.up.weight, gradient[None, None])[0]
    assert found is not None
    assert torch.equal(found, total.bfloat16())


@pytest.mark.parametrize("policy", ["full", "attention"])
def test_recomputing_a_block_stops_before_its_mlp(policy: str) -> None:
    block = tiled(build())
    apply_recompute([block], policy)
    assert_equal(results(block, inputs()), results(build(), inputs()))
    assert block.mlp.calls == [9, 9, 8] * 2


def test_a_norm_after_the_mlp_needs_its_output_again() -> None:
    block = tiled(build(norms_after=True))
    apply_recompute([block], "full")
    assert_equal(results(block, inputs()), results(build(norms_after=True), inputs()))
    assert block.mlp.calls == [9, 9, 8] * 3


def test_dropout_drops_the_same_elements() -> None:
    """Also where the next micro-batch has set its keys before the backward pass of this one."""
    found = []
    for tile in (True, False):
        block, keys = build(), DropoutKeys()
        keys.prepare(64, torch.device("cpu"))
        block.mlp.drop = MeshDropout(0.5, torch.tensor(1), keys)
        if tile:
            tiled(block, 3, keys)
        hidden = inputs()
        keys.set(42, 1, torch.tensor([7, 4]), torch.arange(13))
        out = block(hidden)
        if tile:
            keys.set(42, 1, torch.tensor([1, 2]), torch.arange(13))
        out.square().sum().backward()
        found.append({"output": out.detach(), "hidden": hidden.grad})
    assert_equal(*found)


def test_scores_beside_the_output_are_left_out() -> None:
    torch.manual_seed(0)
    scored, plain = Scored().double(), Scored().double()
    plain.load_state_dict(scored.state_dict())
    block = nn.Module()
    block.mlp = scored
    apply_tiled_mlp([block], DropoutKeys(), shards=3, compiles=False)
    first, second = inputs(), inputs()
    out, scores = scored(first)
    assert scores is None
    out.square().sum().backward()
    plain(second)[0].square().sum().backward()
    torch.testing.assert_close(first.grad, second.grad, rtol=1e-13, atol=1e-13)


def test_a_block_without_an_mlp_is_refused() -> None:
    with pytest.raises(MeshError, match=r"block 0 .*\(Linear\) has no module named mlp"):
        apply_tiled_mlp([nn.Linear(2, 2)], DropoutKeys(), shards=None, compiles=False)


class PeakBytes(TorchDispatchMode):
    """Counts the bytes that live tensors made in it take, and their most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known: set[int] = set()

    def _gone(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.live -= size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if not isinstance(one, torch.Tensor):
                continue
            storage = one.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                size = storage.nbytes()
                self.live += size
                weakref.finalize(storage, self._gone, storage._cdata, size)
        self.most = max(self.most, self.live)
        return out


def measure(shards: int | None, length: int) -> tuple[int, int]:
    """Bytes that four blocks keep for the backward pass, and the most that live at one time."""
    torch.manual_seed(0)
    blocks = [Block().double() for _ in range(DEPTH)]
    if shards is not None:
        apply_tiled_mlp(blocks, DropoutKeys(), shards=shards, compiles=False)
    hidden = inputs(1, length)
    with PeakBytes() as memory:
        states = hidden
        for block in blocks:
            states = block(states)
        kept = memory.live
        states.sum().backward()
    return kept, memory.most


def test_wide_values_exist_for_one_slice_only() -> None:
    length = 512
    wide = 8 * WIDTH * length
    (kept, _), (kept_tiled, most) = measure(None, length), measure(64, length)
    # gate, its activation, up and their product, in every block
    assert kept - kept_tiled == 4 * wide * DEPTH
    # the backward pass makes less than one of them again at one time
    assert most - kept_tiled < wide
