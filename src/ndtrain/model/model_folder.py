"""What belongs into a model folder beside the weights, and how the folder appears all at once."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ndtrain.errors import CheckpointError, RecipeError
from ndtrain.model.key_map import to_file_tensors
from ndtrain.model.shard_files import TensorSpec
from ndtrain.plan.model_source import ModelSource
from ndtrain.recipe.unwritable import advise_unwritable

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MODEL_FILES = (
    *("*.json", "*.safetensors", "*.jinja", "*.model", "*.py", "merges.txt", "vocab.txt"),
    *("README.md", "loss.svg", "recipe.yaml"),
)
_CONFIGS = {"config.json", "adapter_config.json"}
_SPARE_BYTES = 64 * 2**20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class FilePlan:
    """Every tensor that will be written, in order, and which parameter it comes from."""

    specs: tuple[TensorSpec, ...]
    parameters: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Size of all weights."""
        return sum(spec.nbytes for spec in self.specs)


def plan_files(twin: "PreTrainedModel", names: Iterable[str], dtype: torch.dtype) -> FilePlan:
    """What is stored for the named parameters and buffers of a plain meta model.

    Args:
        twin: the plain meta model.
        names: parameters and persistent buffers, tied ones once, in the order of writing.
        dtype: of the stored floating-point tensors.
    """
    state = twin.state_dict()
    specs: list[TensorSpec] = []
    parameters = tuple(names)
    for name in parameters:
        specs += [
            TensorSpec(key, stored_dtype(tensor, dtype), tuple(tensor.shape))
            for key, tensor in to_file_tensors(twin, name, state[name]).items()
        ]
    return FilePlan(tuple(specs), parameters)


def stored_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Integers stay as they are."""
    return dtype if tensor.is_floating_point() else tensor.dtype


def written_dtype(word: str) -> torch.dtype:
    """The dtype that a user asks weights to be written in.

    Raises:
        RecipeError: neither `bf16` nor `fp32`.
    """
    known = {"bf16": torch.bfloat16, "fp32": torch.float32}
    if word not in known:
        raise RecipeError(f"'{word}' is not a dtype.", where="--dtype", hint="Use bf16 or fp32.")
    return known[word]


def base_dtype(source: ModelSource) -> torch.dtype:
    """The dtype in which the base model's weights are stored."""
    word = source.config.get("dtype") or source.config.get("torch_dtype")
    return _DTYPES.get(str(word), torch.float32)


def write_side_files(
    folder: Path,
    twin: "PreTrainedModel",
    source: ModelSource,
    tokenizer: "PreTrainedTokenizerBase | None",
    dtype: torch.dtype,
) -> None:
    """config.json, generation_config.json, the model's own code and the tokenizer.

    Everything of the base stays, except the dtype, a widened vocabulary and a new end token.
    """
    config = _config(twin, source, dtype)
    _write_json(folder / "config.json", config)
    generation = _generation_config(twin, source)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
        _add_end_token(generation, tokenizer.eos_token_id)
    _write_json(folder / "generation_config.json", generation)
    if source.path is not None and source.path.is_dir() and "auto_map" in config:
        for file in source.path.glob("*.py"):
            shutil.copyfile(file, folder / file.name)


def check_destination(dest: Path) -> Path:
    """The place of a new model folder; an older one there will be replaced, nothing else.

    Returns:
        The absolute path.

    Raises:
        RecipeError: it is a file, the current folder, or a folder that holds other things.
    """
    hint = "Name a new folder."
    place = dest.resolve()
    if place == Path.cwd():
        raise RecipeError("is the current folder.", where=str(dest), hint=hint)
    if place.exists() and not place.is_dir():
        raise RecipeError("is a file.", where=str(dest), hint=hint)
    held = sorted(one.name for one in place.iterdir()) if place.is_dir() else []
    other = [one for one in held if not any(fnmatch(one, known) for known in _MODEL_FILES)]
    if other or (held and not _CONFIGS.intersection(held)):
        raise RecipeError(
            f"is no model folder and would be replaced; '{[*other, *held][0]}' is in it.",
            where=str(dest),
            hint=hint,
        )
    return place


def check_free_space(dest: Path, nbytes: int) -> None:
    """Refuse before the first byte what cannot fit.

    Raises:
        CheckpointError: the disk has too little room.
    """
    place = dest
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < nbytes + _SPARE_BYTES:
        raise CheckpointError(
            f"the model needs {nbytes / 2**30:.2f} GiB, but only {free / 2**30:.2f} GiB are free.",
            where=str(dest),
            hint="Free space, or name a folder on another disk.",
        )


@contextmanager
def appearing_folder(dest: Path) -> Iterator[Path]:
    """A folder to write into that takes the name `dest` only when everything succeeded.

    Raises:
        CheckpointError: the disk is full or the place cannot be written.
    """
    partial = dest.with_name(f".{dest.name}.{os.getpid()}.partial")
    outdated = dest.with_name(f".{dest.name}.{os.getpid()}.outdated")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        if dest.exists():
            dest.rename(outdated)
        partial.rename(dest)
    except OSError as error:
        raise CheckpointError(
            f"the model cannot be written: {error.strerror or error}.",
            where=_named_place(dest, partial, error),
            hint=advise_unwritable(dest, error, "name another folder"),
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(outdated, ignore_errors=True)


def _named_place(dest: Path, partial: Path, error: OSError) -> str:
    """The place as the user knows it, not the hidden folder that takes its name in the end."""
    met = Path(error.filename or dest)
    if met.is_relative_to(partial):
        return str(dest / met.relative_to(partial))
    return str(dest if dest.is_relative_to(met) else met)


def _config(twin: "PreTrainedModel", source: ModelSource, dtype: torch.dtype) -> dict[str, Any]:
    own = twin.config.to_diff_dict()
    config = dict(source.config) if source.kind != "random" else own
    config.setdefault("architectures", [type(twin).__name__])
    config["model_type"] = own["model_type"]
    config["use_cache"] = True
    for name in ("quantization_config", "torch_dtype", "_name_or_path"):
        config.pop(name, None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    text = twin.config.get_text_config()
    if "vocab_size" in config or "text_config" not in config:
        config["vocab_size"] = text.vocab_size
    else:
        config["text_config"] = {**config["text_config"], "vocab_size": text.vocab_size}
    return config


def _generation_config(twin: "PreTrainedModel", source: ModelSource) -> dict[str, Any]:
    if source.path is not None:
        file = source.path / "generation_config.json"
        if file.is_file():
            return dict(json.loads(file.read_text(encoding="utf-8-sig")))
    if twin.generation_config is None:
        return {}
    generation: dict[str, Any] = twin.generation_config.to_diff_dict()
    return generation


def _add_end_token(generation: dict[str, Any], token: int | None) -> None:
    """An answer must also end at the token that training taught as its end."""
    if token is None:
        return
    known = generation.get("eos_token_id")
    ends = known if isinstance(known, list) else [] if known is None else [known]
    if token not in ends:
        generation["eos_token_id"] = [*ends, token] if ends else token


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, default=str)
    path.write_text(text + "\n", encoding="utf-8")
