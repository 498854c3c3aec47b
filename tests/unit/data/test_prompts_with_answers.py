"""Rows of a prompt and an answer to it: the answer alone is trained, older answers are not."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ndtrain.data.prepare import Prepared

Piece = tuple[str, bool]
Expect = Callable[[Sequence[Piece]], tuple[list[int], list[int]]]


def turn(role: str, text: str, trained: bool = False) -> list[Piece]:
    """A ChatML turn; the line break after its end token is never trained."""
    return [(f"<|im_start|>{role}\n", False), (f"{text}<|im_end|>", trained), ("\n", False)]


CASES: dict[str, tuple[dict[str, Any], list[Piece], dict[str, Any]]] = {
    "prompt and completion": (
        {
            "prompt": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Old"},
                {"role": "user", "content": "More"},
            ],
            "completion": [{"role": "assistant", "content": "New"}],
        },
        [
            *turn("user", "Hi"),
            *turn("assistant", "Old"),
            *turn("user", "More"),
            *turn("assistant", "New", True),
        ],
        {},
    ),
    "prompt and completion as texts": (
        {"prompt": "Hi", "completion": "Yo"},
        [*turn("user", "Hi"), *turn("assistant", "Yo", True)],
        {},
    ),
    "prompt and completion by the prompt's name": (
        {
            "prompt": [{"role": "user", "content": "Hi"}],
            "completion": {"role": "assistant", "content": "Yo"},
        },
        [*turn("user", "Hi"), *turn("assistant", "Yo", True)],
        {"entry": {"field_messages": "prompt"}},
    ),
    "a prompt that is the whole conversation": (
        {"prompt": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]},
        [*turn("user", "Hi"), *turn("assistant", "Yo", True)],
        {"entry": {"field_messages": "prompt"}},
    ),
    "preference after older answers": (
        {
            "prompt": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Old"},
                {"role": "user", "content": "More"},
            ],
            "chosen": [{"role": "assistant", "content": "Good"}],
            "rejected": [{"role": "assistant", "content": "Bad"}],
        },
        [
            *turn("user", "Hi"),
            *turn("assistant", "Old"),
            *turn("user", "More"),
            *turn("assistant", "Good", True),
        ],
        {},
    ),
    "preference of conversations with the same beginning": (
        {
            "chosen": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Old"},
                {"role": "user", "content": "More"},
                {"role": "assistant", "content": "Good"},
            ],
            "rejected": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Old"},
                {"role": "user", "content": "More"},
                {"role": "assistant", "content": "Bad"},
            ],
        },
        [
            *turn("user", "Hi"),
            *turn("assistant", "Old"),
            *turn("user", "More"),
            *turn("assistant", "Good", True),
        ],
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_only_the_answer_is_trained(
    name: str, prepare_rows: Callable[..., Prepared], expect: Expect
) -> None:
    row, pieces, keys = CASES[name]
    ids, labels = prepare_rows([row], "chat_template", **keys).train.row(0)
    assert (ids.tolist(), labels.tolist()) == expect(pieces)


def test_a_turn_of_the_prompt_may_ask_to_be_trained(
    prepare_rows: Callable[..., Prepared], expect: Expect
) -> None:
    prompt = [{"role": "user", "content": "Hi", "train": True}]
    row = {"prompt": prompt, "completion": "Yo"}
    ids, labels = prepare_rows([row], "chat_template").train.row(0)
    pieces = [*turn("user", "Hi", True), *turn("assistant", "Yo", True)]
    assert (ids.tolist(), labels.tolist()) == expect(pieces)
