"""Trading time for memory inside a block: recompute activations, or compile the block.

Both replace a block's `forward`, so parameter names and the hooks that gather its weights stay as
they are. It is one or the other: a compiled block recomputes within its own graph, where what the
backward pass does not read, such as the block's last product, is not repeated. Only where it is
more than one graph, compiling goes inside and recomputing outside.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operation
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_ATTENTION_OPS = (
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_attention_math.default,
    torch.ops.torch_attn._varlen_attn.default,
)

_WHERE_KNOWN = {
    # process groups are inputs of a block's graph, and nothing that it could keep or not; the
    # compiler of torch 2.13 and later refuses to price them
    "unsafe_treat_script_objects_as_zero_size": True,
    # a block with functions that have a backward of their own, as adapted linears do, comes out
    # of the cache as a whole; what they compute is part of its key
    "autograd_cache_allow_custom_autograd_functions": True,
}
"""Settings of the compiler that not every torch has."""


def _keep_attention(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    if operation in _ATTENTION_OPS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def apply_recompute(blocks: Iterable[nn.Module], policy: str) -> None:
    """Recompute each block in the backward pass instead of keeping its activations.

    Args:
        blocks: the blocks, whose `forward` is replaced.
        policy: `full` keeps the block's input only; `attention` keeps attention's output too.
    """
    contexts: dict[str, Any] = {}
    if policy == "attention":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)
    for block in blocks:
        # every rank's dropout is keyed by place, so no random state needs to be restored
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **contexts
        )


def apply_compile(
    blocks: Iterable[nn.Module], budget: float, *, whole: bool = True, place: str = ""
) -> None:
    """Compile each block as one graph; equal blocks share the compiled code.

    Call it before anything of the model runs: what was compiled until then is forgotten.

    Args:
        blocks: the blocks, or other modules, whose `forward` is replaced.
        budget: share of the activations that the compiler may keep; 0 keeps the block's input
            only. It prices what it recomputes by floating-point work, so that matrix products
            and attention go last.
        whole: a block is one graph; else one before and one after a part that allows it.
        place: of this rank among those whose blocks have other parts of the same matrices.
    """
    # where an earlier model of this process had other sizes, they would count as varying
    torch._dynamo.reset()
    for block in blocks:
        block.forward = compile_function(block.forward, budget=budget, whole=whole, place=place)


def ask_for_gradients(embedding: nn.Module) -> None:
    """Let the first block's inputs need a gradient, as those of all others do.

    Behind a frozen embedding they need none, and for that the first block would be compiled apart
    from the others: seconds of every start, against one product in a step.
    """

    def ask(_: nn.Module, __: Any, outputs: torch.Tensor) -> None:
        if torch.is_grad_enabled() and not outputs.requires_grad:
            outputs.requires_grad_()

    embedding.register_forward_hook(ask)


def compile_function(
    function: Callable[..., Any], *, budget: float, whole: bool = True, place: str = ""
) -> Callable[..., Any]:
    """Compile a forward pass; equal modules share the compiled code.

    Args:
        function: a module's `forward`.
        budget: share of the activations that the compiler may keep.
        whole: it is one graph; else it may be left where `error_on_graph_break` is off.
        place: ranks of other places keep code of their own in the compiler's cache, which knows
            parameters that are split by their whole shape only.
    """
    import torch._functorch.config as partitioner

    # The compiler's settings belong to a thread, and the backward pass recomputes in another one:
    # they are in force exactly while the function runs.
    chosen: dict[str, Any] = {
        "activation_memory_budget": budget,
        # count custom operations such as attention over documents among what is worth keeping
        "is_non_builtin_to_include": True,
    }
    chosen |= {name: value for name, value in _WHERE_KNOWN.items() if hasattr(partitioner, name)}
    settings = partitioner.patch(chosen)
    cache = torch.compiler.config
    own_code = cache.patch(cache_key_tag=cache.cache_key_tag + place)  # type: ignore[attr-defined]
    # graphs of their own: training, evaluation, rows of many lengths, documents and whole rows
    limit = torch._dynamo.config.patch(recompile_limit=64)
    compiled = torch.compile(function, fullgraph=whole)
    if not whole:
        compiled = torch._dynamo.error_on_graph_break(True)(compiled)
    result: Callable[..., Any] = limit(settings(own_code(compiled)))
    return result
