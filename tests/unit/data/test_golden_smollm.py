"""Golden rows over a real vocabulary."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ndtrain.data.prepare import Prepared

Piece = tuple[str, bool]
PrepareRows = Callable[..., Prepared]
END = "<|im_end|>"
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{}\n\n### Response:\n"
)


def turn(role: str, text: str, trained: bool = False) -> list[Piece]:
    return [(f"<|im_start|>{role}\n", False), (f"{text}{END}", trained), ("\n", False)]


def only_row(prepared: Prepared) -> tuple[list[int], list[int]]:
    assert len(prepared.train) == 1
    ids, labels = prepared.train.row(0)
    return ids.tolist(), labels.tolist()


@pytest.mark.parametrize("kind", ["alpaca", "chat_template"])
def test_smollm_rows_decode_to_what_was_written(
    prepare_rows: PrepareRows, smollm_tokenizer: PreTrainedTokenizerBase, kind: str
) -> None:
    """A second source over a real vocabulary: the template's text, cut by hand, encoded whole."""
    if kind == "alpaca":
        row: dict[str, Any] = {"instruction": "Name two colours.", "output": "Red, blue."}
        pieces = [(ALPACA.format("Name two colours."), False), ("Red, blue." + END, True)]
    else:
        row = {
            "messages": [
                {"role": "user", "content": "Name two colours."},
                {"role": "assistant", "content": "Red,  blue.\n\n"},
                {"role": "user", "content": "\nThanks"},
                {"role": "assistant", "content": "Zürich 日本"},
            ]
        }
        pieces = [
            *turn("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
            *turn("user", "Name two colours."),
            *turn("assistant", "Red,  blue.\n\n", True),
            *turn("user", "\nThanks"),
            *turn("assistant", "Zürich 日本", True),
        ]
    ids, labels = only_row(prepare_rows([row], kind, tokenizer=smollm_tokenizer))
    text = "".join(piece for piece, _ in pieces)
    assert smollm_tokenizer.decode(ids) == text
    if kind == "chat_template":
        assert ids == smollm_tokenizer(text, add_special_tokens=False).input_ids
    trained = [
        token
        for piece, is_trained in pieces
        if is_trained
        for token in smollm_tokenizer(piece, add_special_tokens=False).input_ids
    ]
    assert [token for token in labels if token != -100] == trained
