"""Answers: streamed in whole characters, ended at the right token, refused with a reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ndtrain.errors import DataError, MeshError, RecipeError
from ndtrain.model.build import build_model
from ndtrain.model.byte_tokenizer import build_byte_tokenizer
from ndtrain.model.generate import (
    Answer,
    PieceStreamer,
    Sampling,
    answer,
    encode_prompt,
    end_tokens,
)
from ndtrain.model.weights import load_weights
from ndtrain.plan.model_source import find_model
from ndtrain.recipe.schema import Recipe
from ndtrain.train.generate_command import read_prompts
from ndtrain.train.speaker import find_speaker

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def model() -> Any:
    sizes = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    recipe = Recipe(model_config=sizes, learning_rate=1.0)
    source = find_model(recipe)
    model = build_model(source, recipe)
    load_weights(model, source, seed=1, device=torch.device("cpu"))
    return model.eval()


def streamed(ids: list[int]) -> list[str]:
    pieces: list[str] = []
    streamer = PieceStreamer(build_byte_tokenizer(), pieces.append)
    streamer.put(torch.tensor([[1, 2, 3]]))
    for token in ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    return pieces


def test_pieces_are_whole_characters_and_leave_special_tokens_out() -> None:
    assert streamed([*"aü漢!".encode(), 258]) == ["a", "ü", "漢", "!"]


def test_what_stays_incomplete_comes_at_the_end() -> None:
    assert "".join(streamed(list("a漢".encode())[:-1])) == "a�"
    assert streamed([]) == []


def test_the_stream_is_the_answer(model: Any) -> None:
    pieces: list[str] = []
    tokenizer = build_byte_tokenizer()
    told = answer(model, tokenizer, USER, Sampling(20), pieces.append)
    assert "".join(pieces) == told.text
    assert answer(model, tokenizer, USER, Sampling(20)) == told


def test_greedy_answers_are_the_likeliest_tokens(model: Any) -> None:
    tokenizer = build_byte_tokenizer()
    ids = encode_prompt(tokenizer, USER)
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    expected = tokenizer.decode(ids[0, -6:], skip_special_tokens=True)
    assert answer(model, tokenizer, USER, Sampling(6)) == Answer(expected, is_cut_off=True)


def test_an_answer_that_ends_at_the_longest_length_is_not_cut_off(model: Any) -> None:
    tokenizer = build_byte_tokenizer()
    ids = encode_prompt(tokenizer, USER)
    said = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    assert answer(model, tokenizer, USER, Sampling(6)).is_cut_off
    model.generation_config.eos_token_id = said[5]
    first = said.index(said[5]) + 1
    told = answer(model, tokenizer, USER, Sampling(first))
    assert not told.is_cut_off
    assert told.text == tokenizer.decode(said[:first], skip_special_tokens=True)


def test_sampling_follows_the_seed_and_a_tiny_nucleus_is_greedy(model: Any) -> None:
    tokenizer = build_byte_tokenizer()

    def sampled(**options: Any) -> str:
        return answer(model, tokenizer, USER, Sampling(30, **options)).text

    assert sampled(temperature=1.0, seed=1) == sampled(temperature=1.0, seed=1)
    assert sampled(temperature=1.0, seed=1) != sampled(temperature=1.0, seed=2)
    assert sampled(temperature=1.0, top_p=1e-6, seed=1) == sampled()


def test_the_end_token_of_files_and_tokenizer_both_end(model: Any) -> None:
    tokenizer = build_byte_tokenizer()
    model.generation_config.eos_token_id = 7
    assert end_tokens(model, tokenizer) == [7, 258]
    model.generation_config.eos_token_id = [7, 9]
    assert end_tokens(model, tokenizer) == [7, 9, 258]
    model.generation_config.eos_token_id = None
    assert end_tokens(model, tokenizer) == [258]


def test_prompts_without_a_template_are_continued_as_they_are() -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = None
    assert encode_prompt(tokenizer, USER).tolist() == [list(b"Hi")]
    with pytest.raises(DataError, match="the prompt is empty"):
        encode_prompt(tokenizer, [{"role": "user", "content": ""}])


def test_a_conversation_that_the_template_refuses() -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="refuses this conversation: roles must alternate"):
        encode_prompt(tokenizer, USER)


def test_prompts_in_files(tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("\ufeffFirst\r\n\r\nSecond: ü\r\n", encoding="utf-8")
    assert [turns[0]["content"] for turns in read_prompts(text)] == ["First", "Second: ü"]
    rows = tmp_path / "prompts.jsonl"
    rows.write_text(json.dumps({"prompt": "One"}) + "\n" + json.dumps({"messages": USER}) + "\n")
    assert read_prompts(rows) == [[{"role": "user", "content": "One"}], USER]


@pytest.mark.parametrize("line", ["not json", "[]", "{}", '{"messages": [{"role": "user"}]}'])
def test_a_broken_line_of_prompts_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(RecipeError, match="`prompt` or `messages`") as caught:
        read_prompts(path)
    assert caught.value.where == f"{path}:2"


@pytest.mark.parametrize("line", ['{"prompt": "Wh', '{"prompt": "What?"'])
def test_a_prompt_that_is_cut_off_is_called_so(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(RecipeError) as caught:
        read_prompts(path)
    assert caught.value.message == "the line is not valid JSON: it is cut off."
    assert caught.value.where == f"{path}:1"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("runs/nope", "there is no folder 'runs/nope'."),
        ("my.yaml", "'my.yaml' is a recipe, not a model."),
    ],
)
def test_what_is_no_model_is_said_before_the_hub_is_asked(address: str, message: str) -> None:
    with pytest.raises(MeshError) as caught:
        find_speaker(address)
    assert (caught.value.where, caught.value.message) == ("MODEL", message)
    assert "runs/my" in caught.value.hint or "ndtrain train" in caught.value.hint
