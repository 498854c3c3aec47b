"""Values of low-rank adapters: fresh ones independent of the mesh, or those of a saved adapter."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ndtrain.errors import MeshError
from ndtrain.model.names import ParameterName, parse_name, plain_name
from ndtrain.model.random_weights import seed_of
from ndtrain.model.regions import local_tensor, region_of, take_region
from ndtrain.model.weight_files import WeightFiles, open_weights
from ndtrain.model.whole import whole_of

PEFT_PREFIX = "base_model.model."


@torch.no_grad()
def fill_adapters(model: nn.Module, *, seed: int, folder: Path | None = None) -> None:
    """Fill the adapters of a model whose base is already loaded; every rank calls it.

    Args:
        model: possibly without any adapter.
        seed: for fresh ones.
        folder: a saved adapter to take the values from.

    Raises:
        MeshError: the saved adapter does not fit.
    """
    named = dict(model.named_parameters())
    parts = {name: parse_name(name) for name in named if parse_name(name).part is not None}
    if not parts:
        return
    if folder is not None:
        exported = folder / "export"
        folder = exported if exported.is_dir() else folder  # a run directory
        with open_weights(folder, "adapter_model") as files:
            _read_adapter(named, files, folder)
        return
    rule = _init_rule(model)
    for name, parsed in parts.items():
        if parsed.part == "magnitude":
            _fill(named[name], _row_norms(model, name))
        else:
            _fill(named[name], _fresh(name, named[name], parsed, rule, seed))


def saved_key(name: str) -> str:
    """The key of a trained parameter in peft's adapter file."""
    plain = plain_name(name)
    if parse_name(name).part == "magnitude":
        return PEFT_PREFIX + plain.removesuffix(".default.weight").removesuffix(".default")
    return PEFT_PREFIX + plain.replace(".default", "", 1)


def _read_adapter(named: Mapping[str, nn.Parameter], files: WeightFiles, folder: Path) -> None:
    """Everything that is trained comes from the adapter: its factors and modules saved whole."""
    for name, parameter in named.items():
        if not parameter.requires_grad:
            continue
        key = saved_key(name)
        if key not in files:
            raise MeshError(
                f"the adapter lacks '{key}'.",
                where=str(folder),
                hint="Use the same lora_r, lora_target_modules and lora_modules_to_save as it has.",
            )
        if files.shape(key) != tuple(parameter.shape):
            raise MeshError(
                f"'{key}' is {list(files.shape(key))} in the adapter and "
                f"{list(parameter.shape)} here.",
                where=str(folder),
                hint="Use the same base_model and lora_r as the adapter has.",
            )
        part = files.read(key, region_of(parameter))
        if part is not None:
            local_tensor(parameter).copy_(part)


def _init_rule(model: nn.Module) -> Any:
    config = getattr(model, "peft_config", None)
    return config["default"].init_lora_weights if config else True


def _fresh(
    name: str, parameter: nn.Parameter, parsed: ParameterName, rule: Any, seed: int
) -> torch.Tensor:
    """peft's initial values: A uniform as in a linear (or normal), B zero.

    `orthogonal` lets both start with random values whose product is zero.
    """
    shape = tuple(parameter.shape)
    generator = torch.Generator().manual_seed(seed_of(seed, plain_name(name)))
    whole = torch.empty(shape, dtype=torch.float32)
    in_embedding = str(parsed.part).startswith("lora_embedding")
    is_first = str(parsed.part).endswith("_A")
    if rule == "orthogonal" and not in_embedding:
        return _orthogonal(name, shape, is_first=is_first, seed=seed)
    if is_first != in_embedding:  # an embedding's adapter has its zeros in A
        rank = shape[1] if in_embedding else shape[0]
        if in_embedding:
            return whole.normal_(0, 1, generator=generator)
        if rule == "gaussian":
            return whole.normal_(0, 1 / rank, generator=generator)
        return nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
    if rule is False and not in_embedding:
        return nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
    return whole.zero_()


def _orthogonal(name: str, shape: tuple[int, ...], *, is_first: bool, seed: int) -> torch.Tensor:
    """Rows of A and columns of B from two halves of one orthogonal basis, so that B A = 0.

    Args:
        name: of A or B.
        shape: [R, I] of A, [O, R] of B; R is even.
        is_first: whether it is A.
        seed: the run's.
    """
    adapter = plain_name(name).partition(".lora_")[0]
    shared = torch.Generator().manual_seed(seed_of(seed, adapter))
    own = torch.Generator().manual_seed(seed_of(seed, plain_name(name)))
    rank, features = shape if is_first else shape[::-1]
    basis, _ = torch.linalg.qr(torch.randn(rank, rank, generator=shared))
    half = basis[0::2] if is_first else basis[1::2]
    values: torch.Tensor = torch.randn(features, rank // 2, generator=own) @ half / 10
    return values.T.contiguous() if is_first else values


def _row_norms(model: nn.Module, name: str) -> torch.Tensor:
    """DoRA's magnitudes: the length of each output row of the base weight (B A is still zero)."""
    module = name.split(".lora_magnitude_vector.")[0]
    weight = model.get_parameter(f"{module}.base_layer.weight").detach()
    whole = whole_of(weight) if isinstance(weight, DTensor) else weight
    norms: torch.Tensor = torch.linalg.vector_norm(whole.float(), dim=1)
    return norms


def _fill(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    part = take_region(whole.reshape(parameter.shape), region_of(parameter))
    if part is not None:
        local_tensor(parameter).copy_(part)
