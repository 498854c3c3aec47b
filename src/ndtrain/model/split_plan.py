"""Which parts of a model tensor parallelism splits, read from transformers' own description.

`config.base_model_tp_plan` names patterns such as `layers.*.self_attn.q_proj` with a style. Here
they become concrete module names, expanded over adapters, with the exceptions that keep the
result exact: the vocabulary is always split, keys and values stay whole where tp exceeds their
heads, and parameters that see only a part of the work have their gradients summed. With sequence
parallelism that is true of all that is not split and is used on a share of the tokens.
"""

import re
from collections.abc import Collection, Iterator, Mapping

from torch import nn
from transformers import PreTrainedModel

from ndtrain.errors import MeshError
from ndtrain.parallel.tensor import OWN_STYLES, SplitPlan
from ndtrain.plan.checks import check_heads

KEY_VALUE = re.compile(r"\.(k_proj|v_proj)$")


def base_prefix(model: nn.Module, causal_lm: PreTrainedModel) -> str:
    """Name of the transformers model inside `model` (an adapter wrapper puts one around it)."""
    for name, module in model.named_modules():
        if module is causal_lm:
            return f"{name}." if name else ""
    raise ValueError("the model is not part of the wrapper")


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _adapter_parts(name: str, module: nn.Module, style: str) -> Iterator[tuple[str, str]]:
    """An adapted linear is its base and one low-rank factor on the split side of the product."""
    yield f"{name}.base_layer", style
    factor = "lora_B" if style.startswith("colwise") else "lora_A"
    for adapter in getattr(module, factor):
        yield f"{name}.{factor}.{adapter}", style


def _magnitudes(name: str, module: nn.Module) -> set[str]:
    """DoRA's row lengths stay whole, while a rank uses those of its own output rows only."""
    adapters = getattr(module, "lora_magnitude_vector", None) or ()
    return {f"{name}.lora_magnitude_vector.{adapter}.weight" for adapter in adapters}


def _shared_factors(name: str, module: nn.Module, style: str) -> set[str]:
    """With shared tokens, what an adapted linear holds whole sees a part of the work.

    The first factor's output feeds this rank's output features, the second's input is this rank's
    share of the tokens.
    """
    factor = "lora_A" if style.startswith("colwise") else "lora_B"
    return {f"{name}.{factor}.{adapter}.weight" for adapter in getattr(module, factor)}


def split_plan(
    model: nn.Module, causal_lm: PreTrainedModel, tp: int, *, sequence_parallel: bool = False
) -> SplitPlan:
    """The split plan of `model` for `tp` ranks, with names as in `model.named_modules()`.

    Args:
        model: the transformers model, or the adapter wrapper around it.
        causal_lm: the transformers model itself.
        tp: ranks that share each big matrix.
        sequence_parallel: they share the tokens everywhere else.

    Raises:
        MeshError: the heads do not divide, naming the sizes that work; or the tokens cannot be
            shared; or norms of the heads are not split with them.
    """
    config = causal_lm.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    patterns = {
        f"{causal_lm.base_model_prefix}.{key}": style
        for key, style in (getattr(config, "base_model_tp_plan", None) or {}).items()
    }
    if not patterns:
        raise MeshError(
            f"the architecture {config.model_type!r} has no tensor-parallel plan.",
            where="tensor_parallel_size",
            hint="Use tensor_parallel_size: 1; dp_shard_size and context_parallel_size work.",
        )
    splits_heads = any(
        key.endswith("q_proj") for key, style in patterns.items() if style == "colwise"
    )
    if splits_heads:
        check_heads(heads, kv_heads, tp)
        _check_head_norms(causal_lm, patterns)
    whole_kv = splits_heads and kv_heads % tp != 0
    prefix = base_prefix(model, causal_lm)
    modules: dict[str, str] = {}
    partial: set[str] = set()
    entries: set[str] = set()
    for name, module in causal_lm.named_modules():
        style = patterns.get(_pattern(name))
        if style is None:
            continue
        full = prefix + name
        if style.startswith("colwise"):
            entries.add(full.rpartition(".")[0])
        if whole_kv and KEY_VALUE.search(name):
            modules[full] = "slice"
            partial |= {f"{full}.{parameter}" for parameter, _ in module.named_parameters()}
        elif style == "replicated_with_grad_allreduce":
            modules[full] = style
            partial |= {f"{full}.{parameter}" for parameter, _ in module.named_parameters()}
        elif hasattr(module, "base_layer"):
            modules.update(_adapter_parts(full, module, style))
            if sequence_parallel:
                partial |= _shared_factors(full, module, style)
            if sequence_parallel or style.startswith("colwise"):
                partial |= _magnitudes(full, module)
        else:
            modules[full] = style
    parameters = {
        prefix + name: style
        for name, _ in causal_lm.named_parameters()
        if (style := patterns.get(_pattern(name))) is not None
    }
    vocabulary, partial_head = _vocabulary(causal_lm, prefix)
    modules |= vocabulary
    partial |= partial_head
    sliced: set[str] = set()
    if sequence_parallel:
        _check_own_styles(config.model_type, modules, parameters)
        sliced = _between(causal_lm, prefix, entries)
        names = (prefix + name for name, _ in causal_lm.named_parameters())
        partial |= {name for name in names if name.rpartition(".")[0] in sliced}
        rows = (name for name, style in modules.items() if style.startswith("rowwise"))
        partial |= {f"{name}.bias" for name in rows}
    return SplitPlan(
        modules=modules,
        parameters=parameters,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        num_kv_heads=kv_heads,
        partial=frozenset(partial),
        entries=frozenset(entries if sequence_parallel else ()),
        sliced=frozenset(sliced),
    )


def _check_head_norms(causal_lm: PreTrainedModel, patterns: Mapping[str, str]) -> None:
    """Refuse norms that have weights for every head where ranks hold a part of the heads.

    Raises:
        MeshError: the tensor-parallel plan splits the heads and leaves such a norm whole.
    """
    config = causal_lm.config
    heads = config.num_attention_heads
    counts = {heads, getattr(config, "num_key_value_heads", None) or heads}
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    per_head: set[tuple[int, ...]] = {(count, head_size) for count in counts}
    per_head |= {(count * head_size,) for count in counts if count > 1}
    for name, module in causal_lm.named_modules():
        owner = name.rpartition(".")[0]
        if "norm" not in type(module).__name__.lower() or _pattern(name) in patterns:
            continue
        if patterns.get(_pattern(f"{owner}.q_proj")) != "colwise":
            continue
        if any(tuple(one.shape) in per_head for one in module.parameters(recurse=False)):
            raise MeshError(
                f"tensor parallelism splits the heads of '{config.model_type}', but its plan in "
                f"transformers does not split '{name}', which has weights for each of them.",
                where="tensor_parallel_size",
                hint="Use tensor_parallel_size: 1; dp_shard_size and context_parallel_size work.",
            )


def _check_own_styles(
    model_type: str, modules: Mapping[str, str], parameters: Mapping[str, str]
) -> None:
    """Refuse shared tokens where modules of transformers' own expect all of them."""
    foreign = [*parameters, *(name for name, style in modules.items() if style not in OWN_STYLES)]
    if foreign:
        raise MeshError(
            f"tensor_sequence_parallel cannot share the tokens of {model_type!r}: {foreign[0]!r} "
            "is split by transformers, which needs all of them.",
            where="tensor_sequence_parallel",
            hint="Use tensor_sequence_parallel: auto.",
        )


def _between(causal_lm: PreTrainedModel, prefix: str, entries: Collection[str]) -> set[str]:
    """The modules of the base model outside the entries, less the embedding."""
    base, embedding = causal_lm.base_model, causal_lm.get_input_embeddings()
    start = f"{prefix}{causal_lm.base_model_prefix}"
    inside = tuple(f"{entry}." for entry in entries)
    named = {f"{start}.{name}": module for name, module in base.named_modules() if name}
    return {
        name
        for name, module in named.items()
        if module is not embedding and not f"{name}.".startswith(inside)
    }


def _vocabulary(causal_lm: PreTrainedModel, prefix: str) -> tuple[dict[str, str], set[str]]:
    """Embedding and head are split over the vocabulary, whatever the model's plan says.

    Returns the styles, and the parameters of an adapted head that see one part of the vocabulary.
    """
    roles = {
        id(causal_lm.get_input_embeddings()): "embedding",
        id(causal_lm.get_output_embeddings()): "head",
    }
    found: dict[str, str] = {}
    partial: set[str] = set()
    for name, module in causal_lm.named_modules():
        role = roles.get(id(module))
        if role is None:
            continue
        full = prefix + name
        if not hasattr(module, "base_layer"):
            found[full] = role
        elif role == "embedding":
            raise MeshError(
                "an adapter on the token embedding cannot be combined with tensor parallelism.",
                where="lora_target_modules",
                hint="Train it whole (lora_modules_to_save), or use tensor_parallel_size: 1.",
            )
        else:
            found[f"{full}.base_layer"] = role
            for adapter in module.lora_B:
                found[f"{full}.lora_B.{adapter}"] = role
                partial.add(f"{full}.lora_A.{adapter}.weight")
            partial |= _magnitudes(full, module)
    return found, partial
