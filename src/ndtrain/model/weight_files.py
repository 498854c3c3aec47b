"""Reads tensors, or parts of them, from the safetensors files of a model folder."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ndtrain.errors import MeshError
from ndtrain.model.regions import Region, read_region
from ndtrain.model.shard_files import INDEX_FILE


class WeightFiles:
    """The tensors of a folder, by key; only what is asked for is read.

    Args:
        files: open safetensors files.
        places: the file that holds each key.
    """

    def __init__(self, files: dict[Path, Any], places: dict[str, Path]) -> None:
        self._files = files
        self._places = places

    @property
    def keys(self) -> list[str]:
        """All keys, sorted."""
        return sorted(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header alone."""
        return tuple(self._slice(key).get_shape())

    def read(self, key: str, region: Region | None = None) -> torch.Tensor | None:
        """A tensor or a part of it; None when the part is empty."""
        if region is None or not region.dims or region.is_whole(self.shape(key)):
            whole: torch.Tensor = self._files[self._places[key]].get_tensor(key)
            return whole
        tensor_slice = self._slice(key)
        return read_region(region, lambda slices: tensor_slice[slices])

    def read_whole(self, key: str) -> torch.Tensor:
        """A whole tensor."""
        whole: torch.Tensor = self._files[self._places[key]].get_tensor(key)
        return whole

    def _slice(self, key: str) -> Any:
        return self._files[self._places[key]].get_slice(key)


@contextmanager
def open_weights(folder: Path, stem: str = "model") -> Iterator[WeightFiles]:
    """Open the weights of a model folder.

    Args:
        folder: the folder.
        stem: `model`, or `adapter_model` for an adapter.

    Raises:
        MeshError: there are none, one is missing, or one is damaged.
    """
    paths = find_weight_files(folder, stem)
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        places: dict[str, Path] = {}
        for path in paths:
            try:
                files[path] = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise MeshError(
                    f"the weights cannot be read: {error}.",
                    where=str(path),
                    hint="The file is cut short or damaged: copy or download it again.",
                ) from error
            places |= dict.fromkeys(files[path].keys(), path)
        yield WeightFiles(files, places)


def find_weight_files(folder: Path, stem: str = "model") -> list[Path]:
    """The safetensors files of a model, in order.

    Raises:
        MeshError: there are none, or the index names one that is missing.
    """
    single, index = folder / f"{stem}.safetensors", folder / INDEX_FILE
    if stem == "model" and index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise MeshError(
                f"{len(missing)} of {len(names)} weight files are missing, e.g. '{missing[0]}'.",
                where=str(folder),
                hint="Finish the download or the copy.",
            )
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    if sorted(folder.glob("*.bin")) or sorted(folder.glob("*.pth")):
        raise MeshError(
            "the weights are pickled (.bin), which can run code when loaded.",
            where=str(folder),
            hint="Convert them once with transformers: AutoModelForCausalLM.from_pretrained(...)"
            ".save_pretrained(...).",
        )
    raise MeshError(
        f"there is no {stem}.safetensors.",
        where=str(folder),
        hint="Name a folder with safetensors weights.",
    )
