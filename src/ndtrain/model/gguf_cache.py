"""Turns a GGUF file into an ordinary model folder once, and finds it again afterwards.

The folder is named by the content of the file; a small index from (path, size, time of change) to
that content saves hashing the file on every start.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndtrain.environment import cache_dir
from ndtrain.errors import MeshError
from ndtrain.plan.gguf_header import read_gguf_config
from ndtrain.plan.model_source import ModelSource

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_VERSION = "1"
_TOKENIZER, _MODEL = "tokenizer", "model"
_F16_FILE, _F32_FILE = 1, 0


def converted_tokenizer(source: ModelSource) -> "PreTrainedTokenizerBase":
    """The tokenizer inside a GGUF file; fast from the second time on."""
    from transformers import AutoTokenizer

    folder = _cached(source, _TOKENIZER)
    return AutoTokenizer.from_pretrained(str(folder))


def converted_folder(source: ModelSource) -> ModelSource:
    """The GGUF model as a folder with config.json, safetensors and tokenizer.

    Raises:
        MeshError: the `gguf` package is missing, or transformers cannot read the file.
    """
    tokenizer = _cached(source, _TOKENIZER)
    folder = _cached(source, _MODEL)
    for file in tokenizer.iterdir():
        if not (folder / file.name).exists():
            _copy(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return ModelSource("folder", source.name, folder, config, source.revision)


def _cached(source: ModelSource, part: str) -> Path:
    file = _gguf_path(source)
    home = cache_dir() / "gguf"
    folder = home / f"{file.stem[:60]}-{_content_key(file, home)[:16]}" / part
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f"{part}.lock"):
            if not folder.is_dir():
                _convert(file, folder, part)
    except OSError as error:
        raise MeshError(
            f"the converted model cannot be stored: {error}.",
            where=str(folder),
            hint="Make room there, or set XDG_CACHE_HOME to another folder.",
        ) from error
    return folder


def _copy(file: Path, dest: Path) -> None:
    """Copy so that no reader ever sees half a file."""
    partial = dest.with_name(f".{dest.name}.{os.getpid()}")
    shutil.copyfile(file, partial)
    partial.replace(dest)


def _gguf_path(source: ModelSource) -> Path:
    if source.path is None:
        raise ValueError(f"'{source.name}' has no file")
    return source.path


def _content_key(file: Path, home: Path) -> str:
    stat = file.stat()
    quick = f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{_VERSION}"
    note = home / "index" / hashlib.sha256(quick.encode()).hexdigest()[:32]
    if note.is_file():
        return note.read_text(encoding="ascii").strip()
    with file.open("rb") as opened:
        content = hashlib.file_digest(opened, "sha256").hexdigest()
    key = hashlib.sha256(f"{content}\0{_VERSION}".encode()).hexdigest()
    note.parent.mkdir(parents=True, exist_ok=True)
    partial = note.with_name(f"{note.name}.{os.getpid()}")
    partial.write_text(key, encoding="ascii")
    partial.replace(note)
    return key


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time converts; the others wait and then find the folder."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(file: Path, folder: Path, part: str) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise MeshError(
            "reading a GGUF model needs the package 'gguf'.",
            where=str(file),
            hint="Install it: pip install gguf.",
        )
    partial = Path(tempfile.mkdtemp(prefix=f".{part}-", dir=folder.parent))
    try:
        if part == _TOKENIZER:
            _write_tokenizer(file, partial)
        else:
            _write_model(file, partial)
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tokenizer(file: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    except (ValueError, KeyError, ImportError, NotImplementedError) as error:
        raise _unreadable(file, "tokenizer", error) from error
    tokenizer.save_pretrained(str(folder))


def _write_model(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = _stored_dtype(file)
    try:
        # transformers draws its own progress bar, out of step with what ndtrain prints.
        with contextlib.redirect_stderr(io.StringIO()):
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                str(file.parent), gguf_file=file.name, dtype=dtype, **_unpacking()
            )
    except (ValueError, KeyError, ImportError, NotImplementedError) as error:
        raise _unreadable(file, "model", error) from error
    with torch.no_grad():
        _write_weights(model, folder, dtype)
    _write_config(model, folder, dtype)


def _unpacking() -> dict[str, Any]:
    """Newer versions of transformers keep some architectures' weights packed unless told."""
    import transformers

    config_class = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": config_class(dequantize=True)} if config_class else {}


def _stored_dtype(file: Path) -> "torch.dtype":
    """Quantised weights carry at most 8 bits; bf16 keeps them at half the size of fp32."""
    import torch

    kind = read_gguf_config(file)["gguf_file_type"]
    return {_F32_FILE: torch.float32, _F16_FILE: torch.float16}.get(kind, torch.bfloat16)


def _write_weights(model: "PreTrainedModel", folder: Path, dtype: "torch.dtype") -> None:
    from ndtrain.model.shard_files import ShardFiles, TensorSpec

    tensors: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:  # a tied head is stored once
            seen.add(tensor.data_ptr())
            tensors[name] = tensor
    specs = [TensorSpec(name, dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    with ShardFiles(folder, specs) as files:
        for name, tensor in tensors.items():
            files.write(name, [tensor])


def _write_config(model: "PreTrainedModel", folder: Path, dtype: "torch.dtype") -> None:
    config = model.config.to_diff_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(dtype).removeprefix("torch.")
    text = json.dumps(config, indent=2, sort_keys=True, default=str)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    if model.generation_config is not None:
        model.generation_config.save_pretrained(str(folder))


def _unreadable(file: Path, what: str, error: Exception) -> MeshError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    return MeshError(
        f"transformers cannot read the {what} of this GGUF file: {reason}",
        where=str(file),
        hint="Use the model's safetensors folder or hub id instead.",
    )
