"""Reads recipes written for Axolotl: same meaning, same run; another meaning, a clear stop."""

from collections.abc import Callable, Mapping
from typing import Any

from ndtrain.recipe.axolotl_keys import (
    CHOSEN,
    DATASET_CHOSEN,
    DATASET_RENAMED,
    DATASET_UNSUPPORTED,
    RENAMED,
    UNSUPPORTED,
)
from ndtrain.recipe.document import Document
from ndtrain.recipe.problem import KeyPath, Problem, nearest
from ndtrain.recipe.schema import Recipe
from ndtrain.recipe.variables import SOURCE_KEYS
from ndtrain.recipe.words import LOW_BIT_OPTIMIZERS

HARMLESS_PLUGINS = frozenset({"CutCrossEntropyPlugin", "LigerPlugin", "KernelsPlugin"})

SAME_OPTIMIZERS = frozenset(
    {"adamw_anyprecision", "adamw_apex_fused", "adamw_hf", "paged_adamw", "paged_adamw_32bit"}
)

EIGHT_BIT_OPTIMIZERS = frozenset(
    {
        "adamw_8bit",
        "adamw_bnb_8bit",
        "adamw_torch_8bit",
        "ao_adamw_8bit",
        "paged_adamw_8bit",
    }
)

FSDP_KEYS = frozenset(
    {
        "activation_checkpointing",
        "auto_wrap_policy",
        "backward_prefetch",
        "cpu_offload_pin_memory",
        "cpu_ram_efficient_loading",
        "final_state_dict_type",
        "forward_prefetch",
        "fsdp_version",
        "limit_all_gathers",
        "min_num_params",
        "mixed_precision_policy",
        "offload_params",
        "reshard_after_forward",
        "sharding_strategy",
        "state_dict_type",
        "sync_module_states",
        "transformer_layer_cls_to_wrap",
        "use_orig_params",
        "version",
    }
)


def foreign_keys() -> frozenset[str]:
    """All top-level keys known from Axolotl beside our own, for suggestions."""
    return frozenset({*CHOSEN, *RENAMED, *UNSUPPORTED, *_CONVERSIONS})


def foreign_dataset_keys() -> frozenset[str]:
    """The same inside a dataset."""
    return frozenset({*DATASET_CHOSEN, *DATASET_RENAMED, *DATASET_UNSUPPORTED, *_MESSAGE_FIELDS})


def translate(document: Document) -> list[Problem]:
    """Replace Axolotl's keys in the document's values by ours; returns problems and notices."""
    found: list[Problem] = []
    for key, convert in _CONVERSIONS.items():
        if key in document.data:
            before = set(document.data)
            found += convert(document.data)
            for new in document.data.keys() - before:
                document.move((key,), (new,))
    _sort_out(document, (), document.data, CHOSEN, RENAMED, UNSUPPORTED, found)
    for key in SOURCE_KEYS & document.data.keys():
        sources = document.data[key]
        for number, source in enumerate(sources if isinstance(sources, list) else ()):
            if isinstance(source, dict):
                path = (key, number)
                found += _message_fields(path, source)
                renamed = {} if key == "pretraining_dataset" else DATASET_RENAMED
                _sort_out(
                    document, path, source, DATASET_CHOSEN, renamed, DATASET_UNSUPPORTED, found
                )
    return found


def _sort_out(
    document: Document,
    path: KeyPath,
    values: dict[str, Any],
    chosen: Mapping[str, str],
    renamed: Mapping[str, str],
    unsupported: Mapping[str, str],
    found: list[Problem],
) -> None:
    """Take the keys of the three tables out of one mapping."""
    own = Recipe.fields_by_key() if not path else {}
    for key in [key for key in values if key not in own]:
        here = (*path, key)
        if key in renamed:
            found.append(_rename(document, here, renamed[key], values))
        elif key in chosen:
            if not _is_off(values.pop(key)):
                found.append(_notice(here, f"not needed here: {chosen[key]}."))
        elif key in unsupported and not _is_off(values.pop(key)):
            found.append(_unsupported(here, unsupported[key]))


def _rename(document: Document, path: KeyPath, new: str, values: dict[str, Any]) -> Problem:
    old = str(path[-1])
    value = values.pop(old)
    if values.get(new) is not None and values[new] != value:
        return Problem(path, f"is '{new}' here, which is given too.", "Keep one of them.")
    values[new] = value
    document.move(path, (*path[:-1], new))
    return _notice(path, f"is '{new}' here; read as that.")


def _notice(path: KeyPath, message: str) -> Problem:
    return Problem(path, message, is_notice=True)


def _unsupported(path: KeyPath, alternative: str) -> Problem:
    return Problem(
        path,
        "known from Axolotl, but not supported, and leaving it out would change the result.",
        f"Remove it; {alternative}.",
    )


def _is_off(value: Any) -> bool:
    """Whether a key asks for nothing, as `fp16: false` and `deepspeed:` do."""
    return value is None or value is False or value in ("", 0, [], {})


def _plugins(data: dict[str, Any]) -> list[Problem]:
    value = data.pop("plugins")
    names = value if isinstance(value, list) else [] if _is_off(value) else [value]
    found = []
    for number, name in enumerate(names):
        if str(name).rpartition(".")[2] not in HARMLESS_PLUGINS:
            problem = _unsupported(("plugins", number), f"no plugin '{name}' exists here")
            found.append(problem)
    if names and not found:
        found.append(_notice(("plugins",), "not needed here: kernels are chosen for the device."))
    return found


def _fsdp_config(data: dict[str, Any]) -> list[Problem]:
    value = data.pop("fsdp_config")
    if not isinstance(value, dict):
        return [] if _is_off(value) else [Problem(("fsdp_config",), "expected a mapping.")]
    found, taken = [], []
    settings = {str(key).removeprefix("fsdp_"): (key, inner) for key, inner in value.items()}
    for name, (key, inner) in settings.items():
        path = ("fsdp_config", key)
        if name not in FSDP_KEYS:
            close = nearest(name, FSDP_KEYS)
            found.append(Problem(path, _unknown(close)))
        elif name == "activation_checkpointing" and inner is True:
            taken.append("gradient_checkpointing")
            data.setdefault("gradient_checkpointing", True)
        elif name == "reshard_after_forward" and isinstance(inner, bool):
            taken.append("reshard_after_forward")
            data.setdefault("reshard_after_forward", inner)
        elif name == "offload_params" and inner is True:
            found.append(_notice(path, "weights stay on the device; use activation_offloading."))
    used = f"; {' and '.join(taken)} taken over" if taken else ""
    text = f"not needed here: sharding is always on, its size is dp_shard_size{used}."
    return [*found, _notice(("fsdp_config",), text)]


def _unknown(close: str | None) -> str:
    return f"unknown key; did you mean '{close}'?" if close else "unknown key."


def _batch_size(data: dict[str, Any]) -> list[Problem]:
    value, micro = data.pop("batch_size"), data.get("micro_batch_size") or 1
    if _is_off(value):
        return []
    path = ("batch_size",)
    if data.get("gradient_accumulation_steps") is not None:
        return [Problem(path, "gradient_accumulation_steps is given too.", "Keep one of them.")]
    if not isinstance(value, int) or not isinstance(micro, int) or value % micro:
        return [
            Problem(
                path,
                f"'{value}' is not a multiple of micro_batch_size '{micro}'.",
                "Write gradient_accumulation_steps instead.",
            )
        ]
    data["gradient_accumulation_steps"] = value // micro
    return [_notice(path, f"read as gradient_accumulation_steps: {value // micro}.")]


def _checkpointing(data: dict[str, Any]) -> list[Problem]:
    if data["gradient_checkpointing"] not in ("offload", "unsloth"):
        return []
    data["gradient_checkpointing"] = True
    data.setdefault("activation_offloading", True)
    text = "read as gradient_checkpointing: true with activation_offloading: true."
    return [_notice(("gradient_checkpointing",), text)]


def _optimizer(data: dict[str, Any]) -> list[Problem]:
    """Optimizers that are ours under another name, or ours with states in 8 bits."""
    name = str(data["optimizer"])
    if name in SAME_OPTIMIZERS:
        data["optimizer"] = "adamw_torch_fused"
        return [_notice(("optimizer",), f"'{name}' is read as adamw_torch_fused: the same maths.")]
    if name in EIGHT_BIT_OPTIMIZERS:
        data["optimizer"] = "adamw_torch_fused"
        data.setdefault("optimizer_state_dtype", "8bit")
        text = f"'{name}' is read as adamw_torch_fused with optimizer_state_dtype: 8bit."
        return [_notice(("optimizer",), text)]
    return []


def _schedule(data: dict[str, Any]) -> list[Problem]:
    if data["lr_scheduler"] != "warmup_stable_decay":
        return []
    data["lr_scheduler"] = "wsd"
    return [_notice(("lr_scheduler",), "'warmup_stable_decay' is 'wsd' here; read as that.")]


def _pure_bfloat16(data: dict[str, Any]) -> list[Problem]:
    if _is_off(data.pop("bfloat16")):
        return []
    data.setdefault("param_dtype", "bf16")
    data.setdefault("bf16", True)
    text = "read as bf16: true with param_dtype: bf16."
    if data.get("optimizer", LOW_BIT_OPTIMIZERS[0]) in LOW_BIT_OPTIMIZERS:
        data.setdefault("optimizer_state_dtype", "bf16")
        text = "read as bf16: true with param_dtype and optimizer_state_dtype: bf16."
    return [_notice(("bfloat16",), text)]


def _float32(data: dict[str, Any]) -> list[Problem]:
    if _is_off(data.pop("float32")):
        return []
    data.setdefault("bf16", False)
    return [_notice(("float32",), "read as bf16: false.")]


def _best_metric(data: dict[str, Any]) -> list[Problem]:
    if data.pop("metric_for_best_model") in (None, "loss", "eval_loss"):
        return []
    return [_unsupported(("metric_for_best_model",), "the evaluation loss decides")]


def _greater_is_better(data: dict[str, Any]) -> list[Problem]:
    if _is_off(data.pop("greater_is_better")):
        return []
    return [_unsupported(("greater_is_better",), "the evaluation loss decides, less is better")]


def _base_model_config(data: dict[str, Any]) -> list[Problem]:
    value = data.pop("base_model_config")
    if _is_off(value) or value == data.get("base_model"):
        return []
    return [_unsupported(("base_model_config",), "the base model's own configuration is used")]


def _expert_parallel(data: dict[str, Any]) -> list[Problem]:
    if data.pop("expert_parallel_size") in (None, 0, 1):
        return []
    return [_unsupported(("expert_parallel_size",), "use dp_shard_size")]


def _pretraining(data: dict[str, Any]) -> list[Problem]:
    """One stream may stand without a list, or as its path alone."""
    value = data["pretraining_dataset"]
    streams = [value] if isinstance(value, (str, dict)) else value
    if isinstance(streams, list):
        streams = [{"path": item} if isinstance(item, str) else item for item in streams]
    data["pretraining_dataset"] = streams
    return []


def _tracker(key: str, name: str) -> Callable[[dict[str, Any]], list[Problem]]:
    def convert(data: dict[str, Any]) -> list[Problem]:
        if _is_off(data.pop(key)):
            return []
        given = data.get("report_to") or []
        names = given if isinstance(given, list) else [given]
        data["report_to"] = names if name in names else [*names, name]
        return [_notice((key,), f"read as report_to: [{name}].")]

    return convert


_CONVERSIONS: Mapping[str, Callable[[dict[str, Any]], list[Problem]]] = {
    "base_model_config": _base_model_config,
    "batch_size": _batch_size,
    "bfloat16": _pure_bfloat16,
    "expert_parallel_size": _expert_parallel,
    "float32": _float32,
    "fsdp_config": _fsdp_config,
    "gradient_checkpointing": _checkpointing,
    "greater_is_better": _greater_is_better,
    "lr_scheduler": _schedule,
    "metric_for_best_model": _best_metric,
    "optimizer": _optimizer,
    "plugins": _plugins,
    "pretraining_dataset": _pretraining,
    "use_comet": _tracker("use_comet", "comet_ml"),
    "use_mlflow": _tracker("use_mlflow", "mlflow"),
    "use_tensorboard": _tracker("use_tensorboard", "tensorboard"),
    "use_trackio": _tracker("use_trackio", "trackio"),
    "use_wandb": _tracker("use_wandb", "wandb"),
}

_MESSAGE_FIELDS: Mapping[str, str] = {
    "message_field_content": "content",
    "message_field_role": "role",
}


def _message_fields(path: KeyPath, source: dict[str, Any]) -> list[Problem]:
    """Old single keys for what `message_property_mappings` says in one."""
    found = []
    for key, target in _MESSAGE_FIELDS.items():
        column = source.pop(key, None)
        if column is None:
            continue
        if source.get("message_property_mappings") is None:
            source["message_property_mappings"] = {}
        mapping = source["message_property_mappings"]
        if isinstance(mapping, dict):
            mapping.setdefault(target, column)
        text = f"read as message_property_mappings: {{{target}: {column}}}."
        found.append(_notice((*path, key), text))
    return found
