"""Which model a recipe means: a folder, a hub id, a GGUF file or random weights.

Nothing is downloaded and no heavy library is imported here: a hub model is looked up in the local
cache by the layout of its folders.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ndtrain.environment import lookup
from ndtrain.errors import MeshError, RecipeError
from ndtrain.plan.gguf_header import read_gguf_config
from ndtrain.recipe.addresses import PACKAGE, resolve_address
from ndtrain.recipe.problem import nearest
from ndtrain.recipe.schema import Recipe

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FOLDER_WORDS = frozenset(
    ("checkpoints", "export", "exports", "model", "models", "output", "outputs", "runs", "weights")
)
"""First parts of a name that are folders of this machine, not makers on the hub."""
_OFFLINE_WORDS = {"1", "true", "yes", "on"}
BYTE_VOCABULARY = 320
"""Vocabulary of the built-in byte-level tokenizer, rounded up so that it divides by 2 to 64."""


@dataclass(frozen=True)
class ModelSource:
    """Where the weights, the configuration and the tokenizer of a model come from.

    Attributes:
        kind: `folder`, `hub`, `gguf` or `random`.
        name: what the recipe calls it.
        path: the folder or file; None for random weights and for a hub model not yet downloaded.
        config: `config.json` as a mapping; empty for a hub model not yet downloaded.
        revision: hub branch, tag or commit, when the recipe names one.
    """

    kind: Literal["folder", "hub", "gguf", "random"]
    name: str
    path: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None


def find_model(recipe: Recipe, *, where: str = "base_model") -> ModelSource:
    """The model that `recipe` names.

    Args:
        recipe: the recipe.
        where: how messages call the place of the key, e.g. `recipe.yaml:1:1`.

    Raises:
        MeshError: there is no such model, or it cannot be read.
    """
    if recipe.model_config_ is not None:
        return _random_model(recipe.model_config_, recipe.tokenizer_config)
    if recipe.base_model is None:
        raise RecipeError(
            "base_model is missing.",
            where=where,
            hint="Name a hub id, a folder, a .gguf file or package://<package>/<file>.",
        )
    return find_address(recipe.base_model, where=where, revision=recipe.revision_of_model)


def find_address(address: str, *, where: str, revision: str | None = None) -> ModelSource:
    """The model at one address, whatever its kind.

    Raises:
        MeshError: there is no such model, or it cannot be read.
    """
    path = _local_path(address, where)
    if path is None:
        return _hub_model(address, where, revision)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise MeshError(
                f"the model '{address}' is a file, but not a .gguf file.",
                where=where,
                hint="Name the folder that holds config.json, or a .gguf file.",
            )
        return ModelSource("gguf", address, path, read_gguf_config(path))
    return ModelSource("folder", address, path, read_config(path, address, where))


def is_hub_id(address: str, *, where: str) -> bool:
    """Whether an address can only be a model on the hub.

    Raises:
        MeshError: it is neither that nor anything on this machine.
    """
    return _local_path(address, where) is None


def read_config(folder: Path, address: str, where: str) -> dict[str, Any]:
    """`config.json` of a model folder.

    Raises:
        MeshError: the folder is no model, with what it looks like instead.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise MeshError(
            f"the folder '{address}' has no config.json.",
            where=where,
            hint=_folder_hint(folder),
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise MeshError(f"config.json cannot be read: {error}.", where=str(file)) from error
    if not isinstance(config, dict) or not config.get("model_type"):
        raise MeshError(
            "config.json names no model_type.",
            where=str(file),
            hint="Name the folder of a transformers model.",
        )
    return config


def _random_model(config: Mapping[str, Any], tokenizer: str | None) -> ModelSource:
    if not config.get("model_type"):
        raise RecipeError(
            "model_config has no model_type.",
            where="model_config",
            hint="Add e.g. model_type: llama.",
        )
    sizes = dict(config)
    if tokenizer in (None, "bytes"):
        sizes.setdefault("vocab_size", BYTE_VOCABULARY)
    return ModelSource("random", str(config["model_type"]), None, sizes)


def _local_path(address: str, where: str) -> Path | None:
    """The existing file or folder behind an address, None when it can only be a hub id."""
    if address.startswith(PACKAGE):
        return _package_path(address, where)
    path = resolve_address(address) or Path(address).expanduser()
    if path.exists():
        return path.absolute()
    if _HUB_ID.fullmatch(address) and not address.lower().endswith(".gguf"):
        return None
    close = near_folder(path)
    meant = f"Did you mean '{close}'?" if close else "Check the path."
    raise MeshError(
        f"the model '{address}' does not exist.",
        where=where,
        hint=f"{meant} A model of the hub is named by its id, such as Qwen/Qwen3-0.6B.",
    )


def looks_like_folder(name: str) -> bool:
    """Whether a name that could be a hub id is rather meant as a folder of this machine."""
    first, slash, _ = name.partition("/")
    return bool(slash) and (first.lower() in _FOLDER_WORDS or Path(first).is_dir())


def near_folder(path: Path) -> str | None:
    """What stands beside a missing file or folder and is written almost like it."""
    if not path.parent.is_dir() or not os.access(path.parent, os.R_OK | os.X_OK):
        return None
    beside = [one.name for one in path.parent.iterdir() if one.is_dir() or one.suffix == ".gguf"]
    close = nearest(path.name, beside)
    return None if close is None else str(path.with_name(close))


def _package_path(address: str, where: str) -> Path:
    """A missing package is a missing model: exit 3, with the command that installs it."""
    try:
        path = resolve_address(address)
    except RecipeError as error:
        raise MeshError(error.message, where=where, hint=error.hint) from error
    if path is None:
        raise MeshError(f"the address '{address}' names no file.", where=where)
    return path.absolute()


def _hub_model(address: str, where: str, revision: str | None) -> ModelSource:
    snapshot = cached_snapshot(address, revision)
    if snapshot is not None:
        config = read_config(snapshot, address, where)
        return ModelSource("hub", address, snapshot, config, revision)
    if is_offline():
        close = near_folder(Path(address))
        meant = f"Did you mean '{close}'?" if close else "Check the path"
        raise MeshError(
            f"the model '{address}' is neither a folder nor in the local hub cache, and the hub is "
            "switched off (HF_HUB_OFFLINE).",
            where=where,
            hint=f"{meant}{' Else' if close else ', or'} download the model once with the hub "
            "switched on.",
        )
    return ModelSource("hub", address, None, {}, revision)


def is_offline() -> bool:
    """Whether the environment forbids asking the hub."""
    return any(
        (lookup(name) or "").lower() in _OFFLINE_WORDS
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def hub_cache() -> Path:
    """The folder in which huggingface_hub keeps what it downloaded."""
    if cache := lookup("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := lookup("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = lookup("XDG_CACHE_HOME")
    root = Path(base).expanduser() if base else Path.home() / ".cache"
    return root / "huggingface" / "hub"


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The downloaded snapshot of a hub model that holds its config.json, if there is one."""
    repo = hub_cache() / ("models--" + name.replace("/", "--"))
    reference = repo / "refs" / (revision or "main")
    commit = revision or ""
    if reference.is_file():
        commit = reference.read_text(encoding="utf-8").strip()
    snapshot = repo / "snapshots" / commit
    return snapshot if commit and (snapshot / "config.json").is_file() else None


def _folder_hint(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return (
            "It is an adapter: set base_model to the model it was made for and lora_model_dir to "
            "this folder."
        )
    if (folder / "export" / "config.json").is_file():
        return f"It is a run: name '{folder / 'export'}'."
    files = sorted(folder.glob("*.gguf"))
    if files:
        return f"Name the file: '{files[0]}'."
    return "Name the folder of a transformers model, a .gguf file or a hub id."
