"""Splits a model that answers over several devices; one process needs none of this."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ndtrain.errors import MeshError
from ndtrain.model.experts import use_experts
from ndtrain.model.quantised import QuantisedLinear
from ndtrain.model.split_plan import split_plan
from ndtrain.parallel.collectives import gather_replicated
from ndtrain.parallel.linear import chunk_sizes
from ndtrain.parallel.tensor import apply_tensor_parallel


def split_to_serve(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split `model` over `mesh` in place, so that every rank gives the whole logits.

    transformers' own attention and cache then work on this rank's heads.

    Args:
        model: possibly adapted, on the meta device; weights come later.
        mesh: the tp mesh.

    Raises:
        MeshError: the heads do not divide, or the weights are held in few bits.
    """
    if any(isinstance(module, QuantisedLinear) for module in model.modules()):
        raise MeshError(
            "a base in 4 or 8 bits cannot be split over devices.",
            where="--tensor-parallel-size",
            hint="Answer on one device, or merge the adapter first: ndtrain merge RUN DEST.",
        )
    _use_mesh_dora(model)
    tp = mesh.size()
    plan = split_plan(model, model, tp)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    apply_tensor_parallel(model, plan, mesh)
    use_experts(model, tp=tp if plan.parameters else 1, item_size=model.dtype.itemsize)
    if "slice" in plan.modules.values():
        _repeat_own_heads(model, model.config.num_attention_heads // tp)
    _gather_logits(model.get_output_embeddings(), chunk_sizes(vocabulary, tp), mesh.get_group())


def _use_mesh_dora(model: PreTrainedModel) -> None:
    configs = getattr(model, "peft_config", {})
    if any(getattr(config, "use_dora", False) for config in configs.values()):
        from ndtrain.model.dora import use_mesh_dora

        use_mesh_dora(model)


def _repeat_own_heads(model: PreTrainedModel, query_heads: int) -> None:
    """Each rank holds one key/value head, which all of its query heads share."""
    for module in model.modules():
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = query_heads


def _gather_logits(head: nn.Module, sizes: tuple[int, ...], group: dist.ProcessGroup) -> None:
    def gather(_: nn.Module, __: object, logits: torch.Tensor) -> torch.Tensor:
        return gather_replicated(logits, -1, sizes, group)

    head.register_forward_hook(gather)
