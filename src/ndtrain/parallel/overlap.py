"""Products of split linears that are computed while their tokens travel.

Where tensor-parallel ranks share the tokens, a linear split by outputs needs the tokens of all
ranks, and one split by inputs sums its products over them. Done one after the other, the links
wait for the product and the product for the links. Here both are cut by rank (collective matmul,
Wang et al. 2023, "Overlap communication with dependent computation via decomposition in large deep
learning models"): a rank multiplies its own tokens while those of the next arrive, and sends
products for others while it computes its own. In the backward pass gathering, summing and three
products depend on each other less, and each exchange hides as a whole behind a product. What
travels are plain sends between ranks, over any network.

Each is one operation to the compiler, which would otherwise copy the parts together.

Shape letters: R ranks, N tokens of a rank's share, T = R x N, I input features, O output features.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import Function
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    Work,
    _resolve_process_group,
)
from torch.utils.flop_counter import register_flop_formula

# renamed in torch 2.13; 2.11 knows the former names only
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Ranks:
    """The ranks that share the tokens, and whose rows of [T, ...] are whose.

    Args:
        name: of the process group.
        share: tokens of each rank.
    """

    def __init__(self, name: str, share: int) -> None:
        self.group = _resolve_process_group(cast(Any, name))
        self.own, self.count = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._share = share

    def rows(self, rank: int) -> slice:
        """Where the tokens of a rank lie among all."""
        return slice(rank * self._share, (rank + 1) * self._share)

    def turns(self) -> list[tuple[int, int]]:
        """Whom this rank sends to and whom it hears from, turn by turn; every link is used."""
        steps = range(1, self.count)
        return [((self.own + step) % self.count, (self.own - step) % self.count) for step in steps]

    def send(self, outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int) -> Work:
        """Start sending one tensor while another of the same length arrives."""
        length = len(outgoing)
        sent = [length if rank == to else 0 for rank in range(self.count)]
        received = [length if rank == source else 0 for rank in range(self.count)]
        work: Work = dist.all_to_all_single(
            incoming, outgoing, received, sent, group=self.group, async_op=True
        )
        return work


@torch.library.custom_op("ndtrain::gather_multiply", mutates_args=())
def gather_multiply(
    share: torch.Tensor, matrices: list[torch.Tensor], group: str, ranks: int
) -> list[torch.Tensor]:
    """All tokens [T, I], and their product [T, O] with each matrix.

    Args:
        share: this rank's tokens [N, I].
        matrices: [I, O], O of each its own.
        group: name of the process group.
        ranks: how many it has.
    """
    others = _Ranks(group, len(share))
    whole = share.new_empty(ranks * len(share), share.shape[1])
    products = [share.new_empty(len(whole), matrix.shape[1]) for matrix in matrices]
    share = share.contiguous()
    arriving = [
        (others.rows(source), others.send(share, to, whole[others.rows(source)], source))
        for to, source in others.turns()
    ]
    own = others.rows(others.own)
    whole[own] = share
    for rows, work in ((own, None), *arriving):
        if work is not None:
            work.wait()
        for product, matrix in zip(products, matrices, strict=True):
            torch.mm(whole[rows], matrix, out=product[rows])
    return [whole, *products]


@gather_multiply.register_fake
def _(
    share: torch.Tensor, matrices: list[torch.Tensor], group: str, ranks: int
) -> list[torch.Tensor]:
    tokens = ranks * share.shape[0]
    widths = [share.shape[1], *(matrix.shape[1] for matrix in matrices)]
    return [share.new_empty(tokens, width) for width in widths]


@torch.library.custom_op("ndtrain::multiply_scatter", mutates_args=())
def multiply_scatter(
    inputs: torch.Tensor, matrix: torch.Tensor, group: str, ranks: int
) -> torch.Tensor:
    """This rank's tokens [N, O] of the sum over the ranks' products.

    Args:
        inputs: this rank's features of all tokens [T, I].
        matrix: [I, O].
        group: name of the process group.
        ranks: how many it has.
    """
    share = len(inputs) // ranks
    others = _Ranks(group, share)
    parts = inputs.new_empty(ranks, share, matrix.shape[1])
    travelling = []
    for to, source in others.turns():
        product = inputs[others.rows(to)] @ matrix
        travelling.append((product, others.send(product, to, parts[source], source)))
    torch.mm(inputs[others.rows(others.own)], matrix, out=parts[others.own])
    for _, work in travelling:
        work.wait()
    total: torch.Tensor = parts.sum(0)
    return total


@multiply_scatter.register_fake
def _(inputs: torch.Tensor, matrix: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
    return inputs.new_empty(inputs.shape[0] // ranks, matrix.shape[1])


@torch.library.custom_op("ndtrain::gathered_gradients", mutates_args=())
def gathered_gradients(
    share: torch.Tensor,
    gradients: list[torch.Tensor],
    weights: list[torch.Tensor],
    of_whole: torch.Tensor | None,
    wanted: list[bool],
    group: str,
    ranks: int,
) -> list[torch.Tensor]:
    """Gradients of what `gather_multiply` was given: of the share [N, I], then of weights [O, I].

    The tokens are gathered again behind the product for their gradient, which is summed and dealt
    out behind the products for the weights' gradients.

    Args:
        share: this rank's tokens [N, I].
        gradients: of the products [T, O].
        weights: [O, I], as many.
        of_whole: gradient of the gathered tokens by other ways [T, I].
        wanted: which gradients are, that of the share first.
        group: name of the process group.
        ranks: how many it has.
    """
    others = _Ranks(group, len(share))
    whole = share.new_empty(ranks * len(share), share.shape[1])
    gathering = summing = None
    if any(wanted[1:]):
        gathering = _all_gather(whole, share.contiguous(), group=others.group, async_op=True)
    found = []
    if wanted[0]:
        total = None if of_whole is None else of_whole.clone(memory_format=torch.contiguous_format)
        for gradient, weight in zip(gradients, weights, strict=True):
            total = gradient @ weight if total is None else total.addmm_(gradient, weight)
        assert total is not None, "something reads the tokens"
        found.append(share.new_empty(share.shape))
        summing = _reduce_scatter(found[0], total, group=others.group, async_op=True)
    if gathering is not None:
        gathering.wait()
    for gradient, wants in zip(gradients, wanted[1:], strict=True):
        if wants:
            found.append(gradient.T @ whole)
    if summing is not None:
        summing.wait()
    return found


@gathered_gradients.register_fake
def _(
    share: torch.Tensor,
    gradients: list[torch.Tensor],
    weights: list[torch.Tensor],
    of_whole: torch.Tensor | None,
    wanted: list[bool],
    group: str,
    ranks: int,
) -> list[torch.Tensor]:
    candidates = [share, *weights]
    return [
        one.new_empty(one.shape) for one, wants in zip(candidates, wanted, strict=True) if wants
    ]


@register_flop_formula(torch.ops.ndtrain.gather_multiply)
def _gather_multiply_flops(
    share: torch.Size, matrices: list[torch.Size], _: str, ranks: int, **__: Any
) -> int:
    return sum(2 * ranks * share[0] * one[0] * one[1] for one in matrices)


@register_flop_formula(torch.ops.ndtrain.multiply_scatter)
def _multiply_scatter_flops(inputs: torch.Size, matrix: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * inputs[0] * matrix[0] * matrix[1]


@register_flop_formula(torch.ops.ndtrain.gathered_gradients)
def _gathered_gradients_flops(
    share: torch.Size,
    gradients: list[torch.Size],
    weights: list[torch.Size],
    _: Any,
    wanted: list[bool],
    *__: Any,
    **___: Any,
) -> int:
    pairs = list(zip(gradients, weights, strict=True))
    products = [pair for pair, wants in zip(pairs, wanted[1:], strict=True) if wants]
    products += pairs * wanted[0]
    return sum(2 * gradient[0] * weight[0] * weight[1] for gradient, weight in products)


class _GatherMultiply(Function):
    @staticmethod
    def forward(
        ctx: Any, share: torch.Tensor, group: str, ranks: int, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(share, *weights)
        ctx.place = (group, ranks)
        ctx.set_materialize_grads(False)
        return tuple(gather_multiply(share, [weight.T for weight in weights], group, ranks))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        share, *weights = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0]]
        gradients, read = [], []
        for gradient, weight, wants in zip(
            grads[1:], weights, ctx.needs_input_grad[3:], strict=True
        ):
            if gradient is not None:
                gradients.append(gradient.contiguous())
                read.append(weight)
                wanted.append(wants)
        found = iter(gathered_gradients(share, gradients, read, grads[0], wanted, *ctx.place))
        of_share = next(found) if wanted[0] else None
        flags = zip(grads[1:], ctx.needs_input_grad[3:], strict=True)
        of_weights = [next(found) if wants and one is not None else None for one, wants in flags]
        return of_share, None, None, *of_weights


class _MultiplyScatter(Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, group: str, ranks: int
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.place = (group, ranks)
        share: torch.Tensor = multiply_scatter(inputs, weight.T, group, ranks)
        return share

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        inputs, weight = ctx.saved_tensors
        whole, of_inputs = gather_multiply(gradient, [weight], *ctx.place)
        of_weight = whole.T @ inputs if ctx.needs_input_grad[1] else None
        return of_inputs, of_weight, None, None


def gather_and_multiply(
    share: torch.Tensor, weights: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """All tokens [T, I] and their products [T, O] with weights [O, I], from shares [N, I].

    The backward pass keeps the share and gathers it again.
    """
    place = (group.group_name, dist.get_world_size(group))
    if not torch.is_grad_enabled():
        # there the compiler guesses by the number of arguments whether a function has a context
        return tuple(gather_multiply(share, [weight.T for weight in weights], *place))
    found: tuple[torch.Tensor, ...] = _GatherMultiply.apply(share, *place, *weights)  # type: ignore[no-untyped-call]
    return found


def multiply_and_scatter(
    inputs: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """This rank's tokens [N, O] of the sum over the ranks of inputs [T, I] times weight [O, I]."""
    place = (group.group_name, dist.get_world_size(group))
    found: torch.Tensor = _MultiplyScatter.apply(inputs, weight, *place)  # type: ignore[no-untyped-call]
    return found
