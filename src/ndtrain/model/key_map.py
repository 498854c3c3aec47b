"""From the keys of a checkpoint to the names of a model's parameters.

Most models store their parameters under their own names. Some are renamed, and some are put
together from pieces while loading (the experts of a mixture layer, a fused projection);
transformers describes both, and this module is the only one that reads that description.
"""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from ndtrain.model.weight_files import WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LEFT_OVER = (r"inv_freq$", r"\.attn\.(masked_)?bias$", r"\.attention\.(masked_)?bias$")
"""Buffers that older versions of transformers stored."""


@dataclass
class Assembly:
    """Pieces that become one or several parameters.

    Attributes:
        name: the first parameter they become.
        pieces: (pattern of the piece, key), in natural order.
    """

    name: str
    converter: Any
    pieces: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class KeyMap:
    """Where each parameter comes from.

    Attributes:
        direct: parameter name to the one key that holds it.
        assemblies: parameters made of several keys, or cut from one.
        unexpected: keys that belong to no parameter.
    """

    direct: Mapping[str, str]
    assemblies: tuple[Assembly, ...]
    unexpected: tuple[str, ...]


def map_keys(twin: "PreTrainedModel", keys: Iterable[str]) -> KeyMap:
    """Match checkpoint keys with the parameters and buffers of `twin`, a plain meta model."""
    transforms = get_model_conversion_mapping(twin)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    state = twin.state_dict()
    direct: dict[str, str] = {}
    assemblies: dict[str, Assembly] = {}
    unexpected: list[str] = []
    for key in sorted(keys, key=_natural):
        name, pattern = rename_source_key(key, renamings, converters, twin.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            unexpected.append(key)
        elif pattern is None:
            direct[name] = key
        else:
            assembly = assemblies.setdefault(name, Assembly(name, by_pattern[pattern]))
            assembly.pieces.append((pattern, key))
    return KeyMap(direct, tuple(assemblies.values()), tuple(unexpected))


def homeless_keys(keys: KeyMap, twin: "PreTrainedModel") -> list[str]:
    """Unexpected keys that belong to a module of the model, so that leaving them out matters.

    Keys of modules that the model does not have (a vision tower, extra prediction layers) and
    those that transformers names as left-overs are not among them.
    """
    modules = {name for name, _ in twin.named_modules()}
    base = f"{twin.base_model_prefix}."
    left_over = [*(twin._keys_to_ignore_on_load_unexpected or ()), *_LEFT_OVER]
    return [
        key
        for key in keys.unexpected
        if {key.rpartition(".")[0], (base + key).rpartition(".")[0]} & modules
        and not any(re.search(pattern, key) for pattern in left_over)
    ]


def assemble(
    assembly: Assembly, files: WeightFiles, twin: "PreTrainedModel"
) -> dict[str, torch.Tensor]:
    """The whole parameters that the pieces of one assembly become."""
    converter = deepcopy(assembly.converter)
    for pattern, key in assembly.pieces:
        converter.add_tensor(assembly.name, key, pattern, files.read_whole(key))
    made = converter.convert(assembly.name, model=twin, config=twin.config)
    return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def to_file_tensors(
    twin: "PreTrainedModel", name: str, tensor: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What is stored for one parameter: itself, or the pieces other programs expect.

    Works on meta tensors too, which gives names and shapes in advance.
    """
    stored: dict[str, torch.Tensor] = revert_weight_conversion(twin, {name: tensor})
    return stored


def _natural(key: str) -> list[tuple[int, int | str]]:
    """Numbers in a key sort by value, so that expert 10 follows expert 9."""
    parts = re.split(r"(\d+)", key)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]
