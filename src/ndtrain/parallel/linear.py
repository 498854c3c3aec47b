"""Linears and embeddings split over the tensor-parallel axis.

Parameters are DTensors on the tp mesh, split in `torch.chunk` fashion, so that sizes need not
divide and checkpoints know the whole shape. The forward passes use this rank's part and say
with explicit collectives what travels (Megatron-LM, Shoeybi et al. 2019, section 3).

Shape letters: B rows, S tokens, I input features, O output features, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from ndtrain.parallel.collectives import (
    gather_replicated,
    split_replicated,
    sum_gradient,
    sum_over,
)
from ndtrain.parallel.overlap import gather_and_multiply, multiply_and_scatter
from ndtrain.parallel.sequence import gather_rows, sum_tokens


def chunk_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Lengths of the parts `torch.chunk` makes, with zeros where parts stay empty."""
    step = -(-total // parts)
    return tuple(max(0, min(step, total - part * step)) for part in range(parts))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; gradients find their way back."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def split_parameter(parameter: torch.Tensor, mesh: DeviceMesh, dim: int | None) -> nn.Parameter:
    """The parameter as a DTensor split along `dim` (None: whole on each rank)."""
    placement = Replicate() if dim is None else Shard(dim)
    split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(split, requires_grad=parameter.requires_grad)


class ColumnLinear(nn.Module):
    """A linear whose outputs are split: input [B, S, I] whole, output [B, S, O / tp].

    Args:
        linear: the whole linear; its parameters may be on the meta device.
        mesh: the tp mesh.
        gather: give every rank the whole output.
        shares: the input was gathered from shares of the tokens; its gradient is summed there.
    """

    def __init__(
        self, linear: nn.Linear, mesh: DeviceMesh, *, gather: bool = False, shares: bool = False
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = split_parameter(linear.weight, mesh, 0)
        self.bias = None if linear.bias is None else split_parameter(linear.bias, mesh, 0)
        self._group: dist.ProcessGroup = mesh.get_group()
        self._sizes = chunk_sizes(linear.out_features, mesh.size()) if gather else None
        self._shares = shares
        self.multiply: Callable[..., torch.Tensor] = functional.linear
        self.ahead: ProductsAhead | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply this rank's columns."""
        if not self._shares:
            inputs = sum_gradient(inputs, self._group)
        bias = None if self.bias is None else local(self.bias)
        outputs = None if self.ahead is None else self.ahead.take(self, inputs)
        if outputs is None:
            outputs = self.multiply(inputs, local(self.weight), bias)
        elif bias is not None:
            outputs = outputs + bias
        if self._sizes is not None:
            outputs = gather_replicated(outputs, -1, self._sizes, self._group)
        return outputs


def _multiplies_plainly(linear: "ColumnLinear | RowLinear", inputs: torch.Tensor) -> bool:
    """Whether a linear's product is that of two matrices of one dtype."""
    return linear.multiply is functional.linear and linear.weight.dtype == inputs.dtype


class ProductsAhead:
    """Products of column-split linears that read one gathered input, made while it is gathered.

    A linear that is called with that very input takes its product here; with another one, as
    behind a norm, it computes its own.

    Args:
        columns: the linears.
        group: the ranks that share the tokens.
    """

    def __init__(self, columns: Sequence[ColumnLinear], group: dist.ProcessGroup) -> None:
        self._columns = tuple(columns)
        self._group = group
        self._inputs: torch.Tensor | None = None
        self._products: dict[int, torch.Tensor] = {}
        for column in columns:
            column.ahead = self

    def gather(self, share: torch.Tensor, rows: int) -> torch.Tensor:
        """All tokens [rows, T / rows, H] of shares [1, T / tp, H]."""
        plain = {
            number: local(column.weight)
            for number, column in enumerate(self._columns)
            if _multiplies_plainly(column, share)
        }
        if not plain:
            return gather_rows(share, rows, self._group)
        weights = list(plain.values())
        whole, *products = gather_and_multiply(share.flatten(0, 1), weights, self._group)
        self._inputs = whole.view(rows, -1, whole.shape[-1])
        self._products = dict(zip(plain, products, strict=True))
        return self._inputs

    def take(self, column: ColumnLinear, inputs: torch.Tensor) -> torch.Tensor | None:
        """The product of one linear's weight with `inputs`, where it is here."""
        number = self._columns.index(column)
        if inputs is not self._inputs or number not in self._products:
            return None
        product = self._products.pop(number)
        return product.view(*inputs.shape[:-1], product.shape[-1])

    @property
    def holds(self) -> bool:
        """Whether tokens or products are kept here."""
        return self._inputs is not None or bool(self._products)

    def forget(self) -> None:
        """Let go of what nobody took."""
        self._inputs, self._products = None, {}


class RowLinear(nn.Module):
    """A linear whose inputs are split: input [B, S, I / tp], output [B, S, O] summed over tp.

    Args:
        linear: the whole linear; its parameters may be on the meta device.
        mesh: the tp mesh.
        split_input: the input arrives whole and is cut here.
        shares: the output is this rank's share of the tokens, [1, B x S / tp, O].
        overlaps: send products of other ranks' tokens while those of its own are computed.
    """

    def __init__(
        self,
        linear: nn.Linear,
        mesh: DeviceMesh,
        *,
        split_input: bool = False,
        shares: bool = False,
        overlaps: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = split_parameter(linear.weight, mesh, 1)
        # added once, after the sum: it stays whole and outside the tp mesh like a norm's weight
        self.bias = linear.bias
        self._group: dist.ProcessGroup = mesh.get_group()
        self._sizes = chunk_sizes(linear.in_features, mesh.size()) if split_input else None
        self._sum = sum_tokens if shares else sum_over
        self._overlaps = shares and overlaps
        self.multiply: Callable[..., torch.Tensor] = functional.linear

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply this rank's rows and sum over the ranks."""
        if self._sizes is not None:
            inputs = split_replicated(inputs, -1, self._sizes, self._group)
        weight = local(self.weight)
        if self._overlaps and _multiplies_plainly(self, inputs):
            flat = inputs.flatten(0, -2)
            outputs = multiply_and_scatter(flat, weight, self._group).unsqueeze(0)
        else:
            outputs = self._sum(self.multiply(inputs, weight), self._group)
        return outputs if self.bias is None else outputs + self.bias


def take_output_slice(
    module: nn.Module, mesh: DeviceMesh, start: int, length: int, *, shares: bool = False
) -> None:
    """Let this rank keep only its slice of a module's outputs; the parameters stay whole.

    For keys and values when there are more tp ranks than key/value heads. The gradients of the
    module's parameters are then parts of the whole and must be summed over tp.

    Args:
        module: maps [B, S, I] to [B, S, O], e.g. a linear with an adapter.
        mesh: the tp mesh.
        start: first output feature this rank takes.
        length: number of output features it takes.
        shares: the input was gathered from shares of the tokens; its gradient is summed there.
    """
    group: dist.ProcessGroup = mesh.get_group()
    if not shares:
        module.register_forward_pre_hook(lambda _, inputs: (sum_gradient(inputs[0], group),))
    module.register_forward_hook(lambda _, __, outputs: outputs.narrow(-1, start, length))


class VocabEmbedding(nn.Module):
    """Token embedding with the vocabulary split over tp: ids [B, S] to vectors [B, S, H].

    Args:
        embedding: the whole embedding; its weight may be on the meta device.
        mesh: the tp mesh.
        shares: the vectors are those of this rank's share of the tokens, [1, B x S / tp, H].
    """

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh, *, shares: bool = False) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = (
            embedding.num_embeddings,
            embedding.embedding_dim,
        )
        self.padding_idx = embedding.padding_idx
        # Gemma multiplies inside its embedding module
        self.embed_scale = getattr(embedding, "embed_scale", None)
        self.weight = split_parameter(embedding.weight, mesh, 0)
        self._group: dist.ProcessGroup = mesh.get_group()
        self._sum = sum_tokens if shares else sum_over
        sizes = chunk_sizes(embedding.num_embeddings, mesh.size())
        rank = mesh.get_local_rank()
        self._first, self._count = sum(sizes[:rank]), sizes[rank]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up the ids this rank holds and sum over the ranks."""
        weight = local(self.weight)
        own = ids - self._first
        elsewhere = (own < 0) | (own >= self._count)
        vectors = functional.embedding(own.masked_fill(elsewhere, 0), weight)
        vectors = vectors.masked_fill(elsewhere[..., None], 0.0)
        vectors = self._sum(vectors, self._group)
        if vectors._is_view():
            # FSDP, which hangs hooks on what a unit returns, warns of views
            vectors = vectors.clone()
        if self.embed_scale is not None:
            vectors = vectors * self.embed_scale.to(vectors.dtype)
        return vectors


class HeadLinear(nn.Module):
    """Output head with the vocabulary split over tp: [..., H] to this rank's logits [..., V / tp].

    Nothing is exchanged here: the loss sums over the vocabulary's parts, and whoever hands the
    hidden states in sums their gradient.
    """

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = split_parameter(linear.weight, mesh, 0)
        self.bias = None if linear.bias is None else split_parameter(linear.bias, mesh, 0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the part of the vocabulary that this rank holds."""
        bias = None if self.bias is None else local(self.bias)
        return functional.linear(hidden, local(self.weight), bias)
