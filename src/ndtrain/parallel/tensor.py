"""Tensor parallelism: replace the linears that a split plan names by their split counterparts.

The plan says per module what is split; it comes from the model's own description
(`ndtrain.model.split_plan`), so nothing here knows an architecture. Dense linears and embeddings
are ours; expert and latent-attention styles are transformers' own, and this module is the only
place that touches that interface.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, apply_tensor_parallelism

from ndtrain.errors import MeshError
from ndtrain.parallel.linear import (
    ColumnLinear,
    HeadLinear,
    ProductsAhead,
    RowLinear,
    VocabEmbedding,
    chunk_sizes,
    take_output_slice,
)
from ndtrain.parallel.sequence import gather_input

OWN_STYLES = frozenset(
    {
        "colwise",
        "colwise_gather_output",
        "rowwise",
        "rowwise_split_input",
        "embedding",
        "head",
        "slice",
        "replicated_with_grad_allreduce",
    }
)
"""Styles with an implementation here; `head` and `embedding` split the vocabulary."""

FOREIGN_STYLES = frozenset(
    {"packed_colwise", "rowwise", "moe_tp_experts", "mla_kv_a_proj", "local_params", "all_reduce"}
)
"""Styles left to transformers, for fused experts and latent attention."""

_missing = sorted(style for style in FOREIGN_STYLES if style not in ALL_PARALLEL_STYLES)
if _missing:
    raise MeshError(
        f"the installed transformers has no tensor-parallel style {', '.join(_missing)}.",
        hint="Install a transformers version within the range that ndtrain names.",
    )


@dataclass(frozen=True)
class SplitPlan:
    """What tensor parallelism does to a model.

    Attributes:
        modules: style per module name.
        parameters: style per name of a bare parameter, e.g. fused experts.
        head_size: features of one key/value head, for modules of style `slice`.
        partial: names of parameters whose gradients must be summed over tp.
        entries: modules at whose entry the tokens are gathered; without any, every rank holds
            all tokens everywhere.
        sliced: modules between them, which see a rank's share of the tokens.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    head_size: int = 0
    num_kv_heads: int = 0
    partial: frozenset[str] = frozenset()
    entries: frozenset[str] = frozenset()
    sliced: frozenset[str] = frozenset()


def check_styles(plan: SplitPlan) -> None:
    """Refuse styles nobody implements.

    Raises:
        MeshError: names the module and the style.
    """
    for name, style in plan.modules.items():
        if style not in OWN_STYLES | FOREIGN_STYLES:
            raise MeshError(
                f"tensor parallelism cannot split {name!r}: unknown style {style!r}.",
                where="tensor_parallel_size",
                hint="Use tensor_parallel_size: 1 for this model.",
            )
    for name, style in plan.parameters.items():
        if style not in FOREIGN_STYLES:
            raise MeshError(
                f"tensor parallelism cannot split the parameter {name!r}: unknown style {style!r}.",
                where="tensor_parallel_size",
                hint="Use tensor_parallel_size: 1 for this model.",
            )


def apply_tensor_parallel(
    model: nn.Module, plan: SplitPlan, mesh: DeviceMesh, *, overlaps: bool = False
) -> None:
    """Split `model` in place over `mesh`.

    Names stay as they were; parameters become DTensors of their whole shape. `requires_grad` is
    kept. Weights shared by two modules (tied embeddings) stay one parameter.

    Args:
        model: the whole model, usually on the meta device.
        plan: what to split, with names as in `model.named_modules()`.
        mesh: the tp mesh.
        overlaps: compute products while their tokens travel, where ranks share the tokens.
    """
    check_styles(plan)
    shares = bool(plan.entries)
    foreign: dict[str, str] = dict(plan.parameters)
    shared: dict[int, nn.Parameter] = {}
    for name, style in plan.modules.items():
        module = model.get_submodule(name)
        match style:
            case "replicated_with_grad_allreduce":
                continue  # its gradients are in plan.partial; the forward pass needs nothing
            case "slice":
                start = mesh.get_local_rank() * plan.num_kv_heads // mesh.size()
                first = start * plan.head_size
                take_output_slice(module, mesh, first, plan.head_size, shares=shares)
            case "embedding":
                assert isinstance(module, nn.Embedding)
                original = id(module.weight)
                split = VocabEmbedding(module, mesh, shares=shares)
                split.weight = shared.setdefault(original, split.weight)
                model.set_submodule(name, split)
            case "head":
                assert isinstance(module, nn.Linear)
                original = id(module.weight)
                head = HeadLinear(module, mesh)
                head.weight = shared.setdefault(original, head.weight)
                model.set_submodule(name, head)
            case "colwise" | "colwise_gather_output" if isinstance(module, nn.Linear):
                gather = style != "colwise"
                column = ColumnLinear(module, mesh, gather=gather, shares=shares)
                model.set_submodule(name, column)
            case "rowwise" | "rowwise_split_input" if isinstance(module, nn.Linear):
                split_input = style != "rowwise"
                row = RowLinear(
                    module, mesh, split_input=split_input, shares=shares, overlaps=overlaps
                )
                model.set_submodule(name, row)
            case _:
                foreign[name] = style
    if foreign:
        apply_tensor_parallelism(model, mesh, foreign)
    for name in plan.entries:
        entry = model.get_submodule(name)
        ahead = _products_ahead(entry, mesh) if overlaps else None
        gather_input(entry, mesh.get_group(), ahead)


def _products_ahead(entry: nn.Module, mesh: DeviceMesh) -> ProductsAhead | None:
    """Of the linears that read what is gathered at a module's entry."""
    readers = [
        module
        for name, module in entry.named_modules()
        # an adapter's second factor reads the result of its first
        if isinstance(module, ColumnLinear) and "lora_" not in name
    ]
    return ProductsAhead(readers, mesh.get_group()) if readers else None


def local_vocabulary(vocab_size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """First token id and number of ids that this rank's part of head and embedding holds."""
    sizes = chunk_sizes(vocab_size, mesh.size())
    rank = mesh.get_local_rank()
    return sum(sizes[:rank]), sizes[rank]
