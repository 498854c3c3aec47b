"""`ndtrain plan --exact`: what one block really keeps, traced with tensors that have no memory.

The planner counts kept activations by formula. Here one block of the real model is traced with
fake tensors, compiled as in a run, and the tensors that the compiler (or eager autograd) keeps
for the backward pass are added up. Everything else is as planned: it is exact already, or small.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from ndtrain.errors import MeshError
from ndtrain.parallel.dropout import DropoutKeys
from ndtrain.parallel.tiled import apply_tiled_mlp
from ndtrain.plan.book import find_in_book
from ndtrain.plan.calibration import Calibration
from ndtrain.plan.facts import ModelFacts, facts_from_config
from ndtrain.plan.hardware import calibration
from ndtrain.plan.memory import kept_bytes, predict_memory
from ndtrain.plan.model_facts import unknown_sizes
from ndtrain.plan.model_source import find_model
from ndtrain.plan.plan import ParallelPlan
from ndtrain.plan.setting import ATTENTION_BUDGET, Setting
from ndtrain.recipe.load import LoadedRecipe

_TOKENS = 8191
"""Length of the traced row: a prime, so that no size of a weight is mistaken for it."""


def exact_memory(loaded: LoadedRecipe, setting: Setting) -> float:
    """Bytes torch would reserve at the peak of a step, with traced activations.

    Args:
        loaded: the recipe, for its model.
        setting: mesh, micro-batch and policy.

    Raises:
        MeshError: the block cannot be traced.
    """
    config = model_config(loaded)
    facts = facts_from_config(config, name=str(loaded.recipe.base_model), source="recipe")
    return traced_memory(config, facts, setting, calibration())


def traced_memory(
    config: Mapping[str, Any], facts: ModelFacts, setting: Setting, constants: Calibration
) -> float:
    """Bytes torch would reserve, the planner's count of activations replaced by a trace.

    Raises:
        MeshError: the block cannot be traced.
    """
    planned = predict_memory(facts, setting, constants)
    by_name = setting.policy in ("full", "alternate") or (
        setting.policy == "attention" and not setting.compiled
    )
    if by_name or setting.offload:
        return planned.reserved  # the kept tensors are named one by one: nothing to trace
    # The count without its calibration, on one rank: what the trace is compared with.
    plain = replace(constants, kept=1.0, kept_budget=1.0)
    counted = kept_bytes(facts, replace(setting, parallel=ParallelPlan()), plain)
    kept = kept_bytes(facts, setting, constants) * facts.num_layers * setting.local_tokens
    more = kept * (traced_bytes(config, facts, setting) / counted - 1)
    return planned.reserved + more * (1 + constants.fragmentation)


def model_config(loaded: LoadedRecipe) -> Mapping[str, Any]:
    """The configuration of the recipe's model; from the book when it is not on this machine.

    Raises:
        MeshError: the model is neither here nor in the book.
    """
    name = loaded.recipe.base_model or ""
    entry = find_in_book(name)
    try:
        source = find_model(loaded.recipe, where=loaded.position("base_model"))
    except MeshError:
        if entry is None:
            raise
        return entry.config
    if source.config:
        return source.config
    if entry is None:
        raise unknown_sizes(name, loaded.position("base_model"))
    return entry.config


def traced_bytes(config: Mapping[str, Any], facts: ModelFacts, setting: Setting) -> float:
    """Bytes per token that one block keeps between forward and backward pass.

    Raises:
        MeshError: the block cannot be traced.
    """
    dtype = torch.bfloat16 if setting.precision.compute == 2 else torch.float32
    with FakeTensorMode():
        block = _one_block(config, dtype)
        if setting.tiled:
            apply_tiled_mlp([block], DropoutKeys(), shards=setting.tiled_shards, compiles=False)
        hidden = torch.empty(1, _TOKENS, facts.hidden_size, dtype=dtype, requires_grad=True)
        rotary = facts.rope_head_dim or facts.head_dim
        angles = torch.empty(1, _TOKENS, rotary, dtype=dtype)
        inputs = {
            "position_embeddings": (angles, angles),
            "attention_mask": None,
            "position_ids": None,
            "use_cache": False,
        }
        try:
            if setting.compiled:
                kept = _kept_compiled(block, hidden, inputs, angles, setting)
            else:
                kept = _kept_by_autograd(block, hidden, inputs, (angles, *block.parameters()))
        except Exception as error:
            raise MeshError(
                f"a block of '{facts.model_type}' cannot be traced: {_first_line(error)}.",
                where="--exact",
                hint="Leave --exact out: the planner's count does not need it.",
            ) from error
    return kept / _TOKENS


def _one_block(config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """A block of the model; of a mixture, one with experts."""
    sizes = {k: v for k, v in config.items() if k not in ("layer_types", "architectures")}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 128, "pad_token_id": 0}
    if "first_k_dense_replace" in sizes:
        sizes["first_k_dense_replace"] = 0
    built = AutoConfig.for_model(**sizes)
    # eager where scores are shaped by a softcap or sinks, which fused kernels cannot do
    shaped = sizes["model_type"] in ("gemma2", "gpt_oss")
    built._attn_implementation = "eager" if shaped else "sdpa"
    model = AutoModelForCausalLM.from_config(built, dtype=dtype)
    block: nn.Module = model.base_model.layers[0]
    return block


def _kept_compiled(
    block: nn.Module,
    hidden: torch.Tensor,
    inputs: Mapping[str, Any],
    angles: torch.Tensor,
    setting: Setting,
) -> float:
    """Bytes that cross from the compiled forward to the compiled backward graph."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch_config
    from torch._functorch.compilers import nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    found: list[float] = []

    def partition(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        options["compiler"] = "inductor"
        forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **options)
        outputs = forward.graph.output_node().args[0]
        assert isinstance(outputs, Sequence)
        found.append(_activation_bytes(outputs[options["num_fwd_outputs"] :], hidden))
        return forward, backward

    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition)
    budgets = {"budget": setting.budget, "attention": ATTENTION_BUDGET}
    budget = budgets.get(setting.policy, 1.0)
    torch._dynamo.reset()
    with functorch_config.patch(activation_memory_budget=budget):
        whole = not setting.tiled
        compiled = torch.compile(block, backend=backend, fullgraph=whole, dynamic=False)
        if setting.tiled:
            # two graphs and what is kept between them
            compiled = torch._dynamo.error_on_graph_break(True)(compiled)
            return _kept_by_autograd(compiled, hidden, inputs, (angles, *block.parameters()))
        compiled(hidden, **inputs)
    return sum(found)


def _activation_bytes(kept: Sequence[Any], hidden: torch.Tensor) -> float:
    """Bytes of the kept tensors that grow with the row; views of one tensor count once.

    Of the graph's inputs only the block's own input counts: weights and rotary angles are shared.
    """
    storages: dict[int, float] = {}
    for node in kept:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.numel() % _TOKENS:
            continue
        if _is_score_matrix(value):
            continue
        if node.op == "placeholder" and value.shape != hidden.shape:
            continue
        storages[_storage(value)] = _bytes(value)
    return sum(storages.values())


def _kept_by_autograd(
    block: Callable[..., Any],
    hidden: torch.Tensor,
    inputs: Mapping[str, Any],
    others: Iterable[torch.Tensor],
) -> float:
    """Bytes that autograd saves, but for those of `others`."""
    shared = {_storage(tensor) for tensor in others}
    storages: dict[int, float] = {}
    # kept alive: the address of a freed storage could be given to another tensor
    alive: list[torch.Tensor] = []
    with _saved_tensors(alive):
        block(hidden, **inputs)
    for tensor in alive:
        reference = _storage(tensor)
        if reference in shared or tensor.numel() % _TOKENS or _is_score_matrix(tensor):
            continue
        storages[reference] = float(tensor.untyped_storage().nbytes())
    return sum(storages.values())


@contextmanager
def _saved_tensors(into: list[torch.Tensor]) -> Iterator[None]:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        into.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _storage(tensor: torch.Tensor) -> int:
    """Address of the memory that a tensor and its views share."""
    return int(tensor.untyped_storage()._cdata)


def _is_score_matrix(tensor: torch.Tensor) -> bool:
    """Attention scores written out: the planner counts them apart, as they grow with length²."""
    return list(tensor.shape).count(_TOKENS) > 1


def _bytes(tensor: torch.Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
