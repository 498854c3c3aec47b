"""Tiled MLP: long rows pass the MLP of a block in slices of tokens, one after another.

An MLP treats every token by itself, so its wide intermediate values need to exist for one slice
only. The forward pass keeps the MLP's input and nothing else; the backward pass computes each
slice again and takes its gradients at once (Bekman et al. 2025, Arctic Long Sequence Training,
section 3.1). Gradients of weights are summed over the slices in fp32 and handed on once, so that
whoever waits for them (sharding, accumulation, a step in the backward pass) sees one gradient.

Two functions of autograd stand around the slices. The first keeps the input, the second computes
the output: a block that is recomputed as a whole stops once all it keeps is there again, which is
before the MLP, unless something after the MLP reads its output.

Shape letters: B rows, S tokens of a row, T = B x S, N tokens of a slice, H hidden features.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function

from ndtrain.errors import MeshError
from ndtrain.parallel.dropout import DropoutKeys
from ndtrain.parallel.recompute import compile_function
from ndtrain.plan.setting import slice_length


class _Slices:
    """The forward pass of one MLP, slice by slice.

    Args:
        mlp: the MLP; its trained parameters are looked up at each call, because sharding puts
            gathered ones in their place.
        forward: what maps a slice [1, N, H] to [1, N, H], or to a tuple that begins with it.
        keys: what dropout inside adapted linears reads.
        shards: number of slices, None: one for every H tokens.
    """

    def __init__(
        self,
        mlp: nn.Module,
        forward: Callable[[torch.Tensor], Any],
        keys: DropoutKeys,
        shards: int | None,
    ) -> None:
        self._mlp = mlp
        self._forward = forward
        self._keys = keys
        self._shards = shards

    def __call__(self, hidden: torch.Tensor) -> Any:
        """The MLP's output for hidden states [B, S, H]."""
        # a compiled block is compiled before and after this call, and ends a graph nowhere else
        with torch._dynamo.error_on_graph_break(False):
            return self._run(hidden)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, hidden: torch.Tensor) -> Any:
        trained = self.trained()
        if torch.is_grad_enabled() and (hidden.requires_grad or trained):
            kept = _Keep.apply(hidden, self, self._keys.tokens, *trained)  # type: ignore[no-untyped-call]
            output, others = _Compute.apply(kept, self)  # type: ignore[no-untyped-call]
        else:
            output, others = self.output(hidden)
        # what else it returns, a router's scores, is read by nothing in training
        return (output, *others) if others else output

    def trained(self) -> list[nn.Parameter]:
        """The parameters that want a gradient."""
        return [one for one in self._mlp.parameters() if one.requires_grad]

    def output(self, hidden: torch.Tensor) -> tuple[torch.Tensor, tuple[None, ...]]:
        """The output [B, S, H], without a graph, and a None for whatever else the MLP returns."""
        whole: torch.Tensor | None = None
        others: tuple[None, ...] = ()
        for place, part in self._slices(hidden, self._keys.tokens):
            result = self._forward(part)
            if isinstance(result, tuple):
                result, others = result[0], (None,) * (len(result) - 1)
            if whole is None:
                whole = result.new_empty(hidden.shape[:-1].numel(), result.shape[-1])
            whole[place] = result.squeeze(0)
        assert whole is not None, "there is a token"
        return whole.view(*hidden.shape[:-1], -1), others

    def gradients(
        self,
        hidden: torch.Tensor,
        gradient: torch.Tensor,
        tokens: torch.Tensor | None,
        *,
        needs_hidden: bool,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Gradients of the input [B, S, H] and of the trained parameters.

        Args:
            hidden: the input [B, S, H].
            gradient: of the output [B, S, H].
            tokens: dropout keys of the forward pass [B, S].
            needs_hidden: the input wants a gradient.
        """
        trained = self.trained()
        given = gradient.flatten(0, -2)
        flat = torch.empty_like(given, dtype=hidden.dtype) if needs_hidden else None
        sums: list[torch.Tensor | None] = [None] * len(trained)
        for place, part in self._slices(hidden, tokens):
            with torch.enable_grad():
                part = part.detach().requires_grad_(needs_hidden)
                result = self._forward(part)
                output = result[0] if isinstance(result, tuple) else result
            sources = [*([part] if needs_hidden else []), *trained]
            found = list(
                torch.autograd.grad(output, sources, given[None, place], allow_unused=True)
            )
            if flat is not None:
                flat[place] = found.pop(0).squeeze(0)
            for number, one in enumerate(found):
                before = sums[number]
                if one is not None:
                    wide = torch.promote_types(one.dtype, torch.float32)
                    sums[number] = one.to(wide) if before is None else before.add_(one)
        totals = [
            None if total is None else total.to(parameter.dtype)
            for total, parameter in zip(sums, trained, strict=True)
        ]
        return None if flat is None else flat.view_as(hidden), totals

    def _slices(
        self, hidden: torch.Tensor, tokens: torch.Tensor | None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Place among all tokens and values [1, N, H] of each slice, its dropout keys set."""
        flat = hidden.flatten(0, -2)
        length = slice_length(len(flat), flat.shape[1], self._shards)
        for start in range(0, len(flat), length):
            place = slice(start, min(start + length, len(flat)))
            own = tokens
            if tokens is not None:
                # a rank with a share of the tokens gathers this slice of every rank's share
                own = tokens.reshape(-1, len(flat))[:, place].reshape(1, -1)
            with self._dropout_with(own):
                yield place, flat[place].unsqueeze(0)

    @contextmanager
    def _dropout_with(self, tokens: torch.Tensor | None) -> Iterator[None]:
        """Let dropout inside the MLP read the keys of one slice of tokens."""
        before = self._keys.tokens
        self._keys.tokens = tokens
        try:
            yield
        finally:
            self._keys.tokens = before


class _Keep(Function):
    """Identity that keeps the MLP's input; its backward pass is that of the whole MLP."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        slices: _Slices,
        tokens: torch.Tensor | None,
        *_: nn.Parameter,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.slices, ctx.tokens = slices, tokens
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        of_hidden, of_trained = ctx.slices.gradients(
            hidden, gradient, ctx.tokens, needs_hidden=ctx.needs_input_grad[0]
        )
        return of_hidden, None, None, *of_trained


class _Compute(Function):
    """The MLP's output; hands the output's gradient on to `_Keep` as it comes."""

    @staticmethod
    def forward(
        ctx: Any, kept: torch.Tensor, slices: _Slices
    ) -> tuple[torch.Tensor, tuple[None, ...]]:
        return slices.output(kept)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: None) -> tuple[torch.Tensor, None]:
        return gradient, None


def apply_tiled_mlp(
    blocks: Iterable[nn.Module],
    keys: DropoutKeys,
    *,
    shards: int | None,
    compiles: bool,
    place: str = "",
) -> None:
    """Let the MLP of each block work slice by slice, in place.

    Args:
        blocks: the model's blocks, split over tp already; the `forward` of their `mlp` is
            replaced.
        keys: what dropout inside adapted linears reads.
        shards: number of slices of a micro-batch, None: one for every H tokens.
        compiles: compile what a slice passes, as the block around it is.
        place: as for `compile_function`.

    Raises:
        MeshError: a block has no module of the name `mlp`.
    """
    for number, block in enumerate(blocks):
        mlp = getattr(block, "mlp", None)
        if not isinstance(mlp, nn.Module):
            raise MeshError(
                f"block {number} of the model ({type(block).__name__}) has no module named mlp.",
                where="tiled_mlp",
                hint="Remove tiled_mlp; gradient_checkpointing: true works.",
            )
        forward = mlp.forward
        if compiles:
            forward = compile_function(forward, budget=1.0, place=place)
        mlp.forward = _Slices(mlp, forward, keys, shards)
