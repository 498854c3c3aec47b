"""Sizes from a GGUF header alone: hand-written headers with known values, and a real file."""

import struct
from pathlib import Path
from typing import Any

import pytest

from ndtrain.errors import MeshError
from ndtrain.plan.gguf_header import read_gguf_config

SIZES: dict[str, Any] = {
    "block_count": 3,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
}
TOKENS = [f"token{number}" for number in range(50)]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, value: Any) -> bytes:
    """One key/value pair of the format."""
    if isinstance(value, bool):
        return text(key) + struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", 4, value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", 6, value)
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    item = 8 if isinstance(value[0], str) else 4
    body = b"".join(text(one) if item == 8 else struct.pack("<I", one) for one in value)
    return text(key) + struct.pack("<IIQ", 9, item, len(value)) + body


def header(entries: dict[str, Any], tensors: tuple[str, ...], version: int = 3) -> bytes:
    """A file with these keys and tensor names, without any values."""
    pairs = b"".join(entry(key, value) for key, value in entries.items())
    infos = b"".join(text(name) + struct.pack("<IQQIQ", 2, 64, 50, 0, 0) for name in tensors)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    return head + pairs + infos + b"\0" * 256


def entries(architecture: str = "llama", **changed: Any) -> dict[str, Any]:
    sizes = {**SIZES, **changed}
    named = {f"{architecture}.{key}": value for key, value in sizes.items() if value is not None}
    return {
        "general.architecture": architecture,
        **named,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": ["a b"] * 10,
    }


def write(folder: Path, content: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path


def test_sizes_of_a_llama(tmp_path: Path) -> None:
    config = read_gguf_config(write(tmp_path, header(entries(), ("token_embd.weight",))))
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] == 3
    assert config["max_position_embeddings"] == 512
    assert config["hidden_size"] == 64
    assert config["intermediate_size"] == 96
    assert config["num_attention_heads"] == 8
    assert config["num_key_value_heads"] == 2
    assert config["head_dim"] == 8
    assert config["vocab_size"] == len(TOKENS)


@pytest.mark.parametrize(
    ("tensors", "tied"),
    [
        (("token_embd.weight", "blk.0.attn_q.weight"), True),
        (("token_embd.weight", "blk.0.attn_output.weight", "output_norm.weight"), True),
        (("token_embd.weight", "output.weight"), False),
        (("output.weight", "blk.0.attn_q.weight", "token_embd.weight"), False),
    ],
)
def test_a_head_of_its_own_decides_the_tie(
    tensors: tuple[str, ...], tied: bool, tmp_path: Path
) -> None:
    config = read_gguf_config(write(tmp_path, header(entries(), tensors)))
    assert config["tie_word_embeddings"] is tied


@pytest.mark.parametrize(
    ("architecture", "model_type", "extra"),
    [
        ("qwen2", "qwen2", {"attention_bias": True}),
        ("qwen3", "qwen3", {"qk_norm": True}),
        ("qwen3moe", "qwen3_moe", {"qk_norm": True}),
        ("gemma3", "gemma3_text", {"qk_norm": True}),
        ("gpt-oss", "gpt_oss", {}),
    ],
)
def test_architecture_words(
    architecture: str, model_type: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    content = header(entries(architecture), ("token_embd.weight",))
    config = read_gguf_config(write(tmp_path, content))
    assert config["model_type"] == model_type
    assert {key: config.get(key) for key in extra} == extra


def test_head_size_and_heads_that_are_given(tmp_path: Path) -> None:
    keys = entries(**{"attention.key_length": 32, "attention.head_count_kv": None})
    config = read_gguf_config(write(tmp_path, header(keys, ("token_embd.weight",))))
    assert config["head_dim"] == 32
    assert config["num_key_value_heads"] == 8


def test_counts_that_differ_by_layer_give_the_largest(tmp_path: Path) -> None:
    keys = entries(**{"attention.head_count_kv": [0, 4, 2]})
    config = read_gguf_config(write(tmp_path, header(keys, ("token_embd.weight",))))
    assert config["num_key_value_heads"] == 4


def test_sizes_behind_the_tokens_are_found_too(tmp_path: Path) -> None:
    given = entries()
    tokens = {"tokenizer.ggml.tokens": given.pop("tokenizer.ggml.tokens")}
    keys = {"general.architecture": "llama", **tokens, **given}
    config = read_gguf_config(write(tmp_path, header(keys, ("token_embd.weight",))))
    assert (config["hidden_size"], config["vocab_size"]) == (64, 50)


def test_reading_stops_at_the_token_list(tmp_path: Path) -> None:
    """What follows the token list is damaged and does not matter."""
    content = header(entries(), ("token_embd.weight",))
    end = content.index(text("token3"))
    damaged = content[:end] + b"\xff" * 40 + _tensor_list(content)
    config = read_gguf_config(write(tmp_path, damaged))
    assert config["vocab_size"] == 50
    assert config["tie_word_embeddings"] is True


def _tensor_list(content: bytes) -> bytes:
    return content[content.index(text("token_embd.weight")) :]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + b"\0" * 64, "not a GGUF file: it starts with b'PK"),
        (header(entries(), ())[:100], "cut short"),
        (b"", "not a GGUF file"),
        (header(entries(), (), version=1), "GGUF version 1 is not supported"),
        (header(entries(block_count=None), ()), "architecture 'llama' lacks block_count"),
        (header({"general.architecture": "clip"}, ()), "lacks block_count"),
    ],
)
def test_files_that_are_no_model(content: bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(MeshError, match=message) as caught:
        read_gguf_config(path)
    assert caught.value.where == str(path)
