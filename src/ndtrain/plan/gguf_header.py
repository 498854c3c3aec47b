"""Sizes of a model from the header of its GGUF file, without reading the vocabulary or weights.

The header is a list of typed key/value pairs, then the names and shapes of the tensors, then the
data. The sizes come first; reading stops at the token list, whose length alone is needed.
"""

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ndtrain.errors import MeshError

_MAGIC = b"GGUF"
_TOKENS = "tokenizer.ggml.tokens"
_STRING, _ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_FORMATS |= {12: "d"}
_LONGEST_KEY = 65_536
_BYTES_PER_TENSOR_INFO = 192

_MODEL_TYPES = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "minimax-m2": "minimax_m2",
}
"""Where llama.cpp's architecture word is not transformers' model_type."""

_QK_NORM = {"qwen3", "qwen3moe", "gemma3", "minimax-m2"}
_QKV_BIAS = {"qwen2", "qwen2moe"}

_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
}
_REQUIRED = ("block_count", "embedding_length", "attention.head_count")


def read_gguf_config(path: Path) -> dict[str, Any]:
    """A transformers-like config of the model in a GGUF file.

    Raises:
        MeshError: the file is not GGUF, is cut short, or lacks the sizes.
    """
    try:
        with path.open("rb") as file:
            keys, num_tensors = _read_keys(file, path)
            tied = _is_tied(file, num_tensors)
    except (struct.error, UnicodeDecodeError, KeyError, EOFError) as error:
        raise MeshError(
            "the GGUF header is cut short or damaged.",
            where=str(path),
            hint="Download the file again.",
        ) from error
    return _config(keys, tied, path)


def _read_keys(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    magic = file.read(4)
    if magic != _MAGIC:
        raise MeshError(
            f"not a GGUF file: it starts with {magic!r} instead of {_MAGIC!r}.",
            where=str(path),
            hint="Name a GGUF file, or a folder with config.json and safetensors.",
        )
    version, num_tensors, num_keys = _unpack(file, "<IQQ")
    if version not in (2, 3):
        raise MeshError(f"GGUF version {version} is not supported; 2 and 3 are.", where=str(path))
    keys: dict[str, Any] = {}
    for _ in range(num_keys):
        name = _read_string(file)
        (kind,) = _unpack(file, "<I")
        if name == _TOKENS:
            _, keys[name] = _unpack(file, "<IQ")
            architecture = keys.get("general.architecture", "")
            if all(f"{architecture}.{key}" in keys for key in _REQUIRED):
                break
            file.seek(-12, 1)
            _skip_value(file, kind)
        else:
            keys[name] = _read_value(file, kind)
    return keys, int(num_tensors)


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _read_string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<Q")
    text = file.read(length)
    if len(text) != length:
        raise EOFError
    return text.decode("utf-8", errors="replace")


def _read_value(file: BinaryIO, kind: int) -> Any:
    """One value; long arrays (merges, scores) come back as their length only."""
    if kind == _STRING:
        return _read_string(file)
    if kind != _ARRAY:
        return _unpack(file, "<" + _FORMATS[kind])[0]
    item, count = _unpack(file, "<IQ")
    if count > _LONGEST_KEY or item == _ARRAY:
        file.seek(-12, 1)
        _skip_value(file, kind)
        return count
    if item == _STRING:
        return [_read_string(file) for _ in range(count)]
    return list(_unpack(file, f"<{count}{_FORMATS[item]}"))


def _skip_value(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        (length,) = _unpack(file, "<Q")
        file.seek(length, 1)
    elif kind == _ARRAY:
        item, count = _unpack(file, "<IQ")
        if item in _FORMATS:
            file.seek(count * struct.calcsize("<" + _FORMATS[item]), 1)
        else:
            for _ in range(count):
                _skip_value(file, item)
    else:
        file.seek(struct.calcsize("<" + _FORMATS[kind]), 1)


def _is_tied(file: BinaryIO, num_tensors: int) -> bool:
    """Whether the tensor list has no head of its own.

    The list lies behind the token list; its names carry their length in front, so the two that
    matter are found by a search in the mapped file instead of by walking every token.
    """
    embedding, head = _name_bytes("token_embd.weight"), _name_bytes("output.weight")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        place = view.find(embedding, file.tell())
        if place < 0:
            return False
        reach = num_tensors * _BYTES_PER_TENSOR_INFO
        return view.find(head, max(0, place - reach), place + reach) < 0


def _name_bytes(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def _config(keys: Mapping[str, Any], tied: bool, path: Path) -> dict[str, Any]:
    architecture = str(keys.get("general.architecture", ""))
    missing = [name for name in _REQUIRED if f"{architecture}.{name}" not in keys]
    if missing:
        raise MeshError(
            f"the GGUF header of architecture '{architecture}' lacks {', '.join(missing)}.",
            where=str(path),
            hint="Name the GGUF file of a decoder language model.",
        )
    config: dict[str, Any] = {
        "model_type": _MODEL_TYPES.get(architecture, architecture),
        "tie_word_embeddings": tied,
        "gguf_file_type": keys.get("general.file_type"),
    }
    for key, name in _KEYS.items():
        value = keys.get(f"{architecture}.{key}")
        if isinstance(value, list):  # one count a layer: the widest decides what has to divide
            value = max(value) if value else None
        if value is not None:
            config[name] = value
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if "vocab_size" not in config and _TOKENS in keys:
        config["vocab_size"] = keys[_TOKENS]
    if architecture in _QK_NORM:
        config["qk_norm"] = True
    if architecture in _QKV_BIAS:
        config["attention_bias"] = True
    return config
