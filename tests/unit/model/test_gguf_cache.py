"""A GGUF file becomes an ordinary model folder once: same weights, same tokenizer, found again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM

from ndtrain.errors import MeshError
from ndtrain.model import gguf_cache
from ndtrain.model.build import build_model
from ndtrain.model.byte_tokenizer import SPECIAL_TOKENS, build_byte_tokenizer
from ndtrain.model.ready import ready_model
from ndtrain.model.tokenizer import load_tokenizer
from ndtrain.model.weights import load_weights
from ndtrain.plan.model_source import ModelSource, find_model
from ndtrain.recipe.schema import Recipe

HIDDEN, HEADS, KV_HEADS, WIDE, LAYERS, VOCABULARY = 32, 4, 2, 64, 2, 260


def write_gguf(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A tiny llama with the byte-level vocabulary."""
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_file_type(0)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    tokenizer = build_byte_tokenizer()
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    vocabulary.append(("ab", 259))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token, _ in vocabulary])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(256)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_tensors(tied: bool) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw) * 0.05

    tensors = {"token_embd.weight": normal(VOCABULARY, HIDDEN)}
    side = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        shapes = {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (side, HIDDEN),
            "attn_v": (side, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (WIDE, HIDDEN),
            "ffn_up": (WIDE, HIDDEN),
            "ffn_down": (HIDDEN, WIDE),
        }
        for name, shape in shapes.items():
            tensors[f"blk.{layer}.{name}.weight"] = normal(*shape)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = 1 + normal(HIDDEN)
    tensors["output_norm.weight"] = 1 + normal(HIDDEN)
    if not tied:
        tensors["output.weight"] = normal(VOCABULARY, HIDDEN)
    return tensors


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ndtrain" / "gguf"


def recipe(path: Path, **keys: Any) -> Recipe:
    return Recipe(base_model=str(path), learning_rate=1.0, **keys)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_tokenizer_are_those_of_the_file(
    tied: bool, tmp_path: Path, own_cache: Path
) -> None:
    tensors = random_tensors(tied)
    wanted = recipe(write_gguf(tmp_path / "tiny.gguf", tensors))
    source = find_model(wanted)
    assert source.config["tie_word_embeddings"] is tied
    ready = ready_model(source)
    assert ready.kind == "folder"
    assert own_cache in (ready.path or Path()).parents
    model = build_model(ready, wanted)
    load_weights(model, ready, seed=1, device=torch.device("cpu"))
    assert torch.equal(model.model.embed_tokens.weight, tensors["token_embd.weight"])
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, tensors["blk.1.ffn_down.weight"])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    ids = torch.arange(16)[None]
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=ids).logits, reference(input_ids=ids).logits)
    tokenizer = load_tokenizer(source, wanted)
    assert tokenizer("Grüße<|im_end|>")["input_ids"] == [*"Grüße".encode(), 258]
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    again = load_tokenizer(ready, wanted)
    assert again("Grüße ab<|im_end|>")["input_ids"] == [*"Grüße ".encode(), 259, 258]


def test_a_second_start_and_a_copy_find_the_same_folder(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_tensors(True))
    first = ready_model(find_model(recipe(path)))
    copied = tmp_path / "elsewhere" / "tiny.gguf"
    copied.parent.mkdir()
    copied.write_bytes(path.read_bytes())
    monkeypatch.setattr(gguf_cache, "_convert", _must_not_run)
    assert ready_model(find_model(recipe(path))).path == first.path
    assert ready_model(find_model(recipe(copied))).path == first.path


def _must_not_run(*_: object) -> None:
    raise AssertionError("the model was converted again")


def test_other_content_under_the_same_name_is_converted_anew(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_tensors(True))
    first = ready_model(find_model(recipe(path)))
    changed = random_tensors(True)
    changed["output_norm.weight"] += 1
    write_gguf(path, changed)
    second = ready_model(find_model(recipe(path)))
    assert first.path != second.path


def test_a_failed_conversion_leaves_nothing_and_says_why(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(MeshError, match="transformers cannot read the tokenizer"):
        ready_model(ModelSource("gguf", "tiny", path, {}))
    assert not [folder for folder in own_cache.rglob("*") if folder.name in ("model", "tokenizer")]


def test_without_the_gguf_package_the_message_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_tensors(True))
    source = find_model(recipe(path))
    monkeypatch.setattr(gguf_cache.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MeshError, match="needs the package 'gguf'") as caught:
        ready_model(source)
    assert caught.value.hint == "Install it: pip install gguf."
