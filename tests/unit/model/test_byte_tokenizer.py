"""The built-in tokenizer: ids are bytes, and it is an ordinary tokenizer to everybody else."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ndtrain.model.byte_tokenizer import END, PAD, START, build_byte_tokenizer
from ndtrain.model.tokenizer import load_tokenizer, tokenizer_key
from ndtrain.plan.model_source import BYTE_VOCABULARY, find_model
from ndtrain.recipe.schema import Recipe, SpecialTokens

TEXTS = ["", "plain", " two  spaces ", "Grüße, 漢字 🙂\n\t\r", "".join(map(chr, range(128)))]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "Yes.\n"},
]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_bytes(text: str) -> None:
    tokenizer = build_byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens_follow_the_bytes() -> None:
    tokenizer = build_byte_tokenizer()
    assert tokenizer.convert_tokens_to_ids([PAD, START, END]) == [256, 257, 258]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (
        256,
        258,
        None,
    )
    assert len(tokenizer) == 259 <= BYTE_VOCABULARY


def test_the_template_is_chatml_and_marks_what_the_assistant_says() -> None:
    tokenizer = build_byte_tokenizer()
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n"
        "<|im_start|>assistant\nYes.\n<|im_end|>\n"
    )
    encoded = tokenizer.apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [
        token
        for token, is_answer in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        if is_answer
    ]
    assert tokenizer.decode(marked) == "Yes.\n<|im_end|>"
    prompt = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert text.startswith(prompt)


def test_it_survives_saving(tmp_path: Path) -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_key(loaded) == tokenizer_key(tokenizer)
    for text in TEXTS:
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]


def recipe(**keys: object) -> Recipe:
    return Recipe(model_config={"model_type": "llama"}, learning_rate=1.0, **keys)


def test_added_tokens_get_ids_behind_the_others_and_change_the_key() -> None:
    plain = load_tokenizer(find_model(recipe()), recipe())
    roles = SpecialTokens(eos_token="<end>", additional_special_tokens=("<think>",))
    wanted = recipe(special_tokens=roles, tokens=("word",))
    tokenizer = load_tokenizer(find_model(wanted), wanted)
    assert tokenizer.convert_tokens_to_ids(["<end>", "<think>", "word"]) == [259, 260, 261]
    assert len(tokenizer) == 262
    assert tokenizer.eos_token == "<end>"
    assert tokenizer("a word<think>")["input_ids"] == [*b"a ", 261, 260]
    assert START in tokenizer.all_special_tokens, "those of the base stay special"
    assert tokenizer_key(tokenizer) != tokenizer_key(plain)


def test_a_missing_pad_token_becomes_an_existing_one(tmp_path: Path) -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    wanted = recipe(tokenizer_config=str(_with_config(tmp_path)))
    loaded = load_tokenizer(find_model(wanted), wanted)
    assert loaded.pad_token_id == loaded.eos_token_id
    assert len(loaded) == len(tokenizer)


def _with_config(folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def test_the_template_is_part_of_the_key() -> None:
    one, other = build_byte_tokenizer(), build_byte_tokenizer()
    assert tokenizer_key(one) == tokenizer_key(other)
    other.chat_template = "{{ messages }}"
    assert tokenizer_key(one) != tokenizer_key(other)
