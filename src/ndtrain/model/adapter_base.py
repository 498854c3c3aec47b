"""How an adapter names the model it was trained on, and how that is found again."""

import json
from pathlib import Path

from ndtrain.errors import MeshError
from ndtrain.model.ready import ready_model
from ndtrain.plan.model_source import ModelSource, find_address
from ndtrain.recipe.addresses import PACKAGE

ADAPTER_CONFIG = "adapter_config.json"
"""The file that makes a folder an adapter in peft's format."""


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds an adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def base_address(source: ModelSource) -> str | None:
    """How the base is found again: its hub id, the folder of its weights, or what ndtrain converts.

    A GGUF file or a package is named itself, not the folder in a cache that was made of it. Random
    weights are stored nowhere: None.
    """
    if source.kind == "random":
        return None
    if source.name.startswith(PACKAGE):
        return source.name
    if source.name.lower().endswith(".gguf"):
        return str(Path(source.name).expanduser().absolute())
    return source.name if source.kind == "hub" or source.path is None else str(source.path)


def named_base(folder: Path) -> str | None:
    """The base that an adapter's folder names; None where it names none, or is no adapter."""
    if not is_adapter(folder):
        return None
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return str(config.get("base_model_name_or_path") or "") or None


def base_of_adapter(folder: Path) -> ModelSource:
    """The base of an adapter, on this machine.

    Raises:
        MeshError: the adapter names none, or it cannot be found, downloaded or converted.
    """
    place = str(folder / ADAPTER_CONFIG)
    base = named_base(folder)
    if base is None:
        raise MeshError(
            "the adapter names no base model; one with random weights is stored nowhere.",
            where=place,
            hint="Name the run itself, or write the base into base_model_name_or_path.",
        )
    return ready_model(find_address(base, where=place), where=place)
