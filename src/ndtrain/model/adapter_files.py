"""Writes a trained adapter in peft's format, and refuses to write a broken one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ndtrain.errors import CheckpointError
from ndtrain.model.adapter_base import ADAPTER_CONFIG, base_address
from ndtrain.model.adapter_weights import PEFT_PREFIX, saved_key
from ndtrain.model.names import names_of_parameters, parse_name, plain_name
from ndtrain.model.shard_files import ShardFiles, TensorSpec
from ndtrain.plan.model_source import ModelSource

_SHOWN = 3


def adapter_names(model: nn.Module) -> dict[str, list[str]]:
    """Each trained parameter's first name and the keys under which peft looks for it."""
    return {
        names[0]: [saved_key(name) for name in names]
        for parameter, names in names_of_parameters(model).items()
        if parameter.requires_grad
    }


def check_adapter(tensors: Mapping[str, torch.Tensor], *, trained: bool) -> None:
    """Refuse an adapter that would not do what was trained.

    Args:
        tensors: whole tensors by parameter name.
        trained: whether steps were taken, after which no B may be all zero.

    Raises:
        CheckpointError: a factor is no matrix, not finite, lacks its partner or is still zero.
    """
    faults = []
    for name, tensor in tensors.items():
        part = parse_name(name).part
        if part in ("lora_A", "lora_B") and (tensor.ndim != 2 or 0 in tensor.shape):
            faults.append(f"'{plain_name(name)}' is {list(tensor.shape)} instead of a matrix")
        elif not bool(torch.isfinite(tensor).all()):
            faults.append(f"'{plain_name(name)}' is not finite")
        elif trained and part == "lora_B" and not bool(tensor.any()):
            faults.append(f"'{plain_name(name)}' is still zero after training")
        elif part in ("lora_A", "lora_B"):
            other = (
                name.replace(".lora_A.", ".lora_B.")
                if part == "lora_A"
                else name.replace(".lora_B.", ".lora_A.")
            )
            if other not in tensors:
                faults.append(f"'{plain_name(name)}' lacks its partner")
    if not any(parse_name(name).part for name in tensors):
        faults.append("it holds no low-rank factor at all")
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CheckpointError(
            f"the adapter is broken and not written: {', '.join(faults[:_SHOWN])}{more}.",
            hint="The checkpoints are untouched; report this with `ndtrain env`.",
        )


def write_adapter(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    names: Mapping[str, list[str]],
    peft_config: Any,
    source: ModelSource,
) -> None:
    """Write adapter_model.safetensors and adapter_config.json.

    Args:
        folder: an existing folder.
        tensors: whole tensors by parameter name.
        names: from `adapter_names`.
        peft_config: the configuration with which the adapter was made.
        source: the base model, named in the configuration.
    """
    stored = {key: tensors[name] for name, keys in names.items() for key in keys}
    specs = [TensorSpec(key, one.dtype, tuple(one.shape)) for key, one in stored.items()]
    with ShardFiles(folder, specs, shard_bytes=2**62, stem="adapter_model") as files:
        for key, tensor in stored.items():
            files.write(key, [tensor])
    config = peft_config.to_dict()
    config["base_model_name_or_path"] = base_address(source)
    config["inference_mode"] = True
    text = json.dumps(config, indent=2, sort_keys=True, default=_plain)
    (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")


def base_name(key: str) -> str:
    """Name in the base model of a module saved whole, from its key in an adapter file."""
    return key.removeprefix(PEFT_PREFIX)


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(getattr(value, "value", value))
