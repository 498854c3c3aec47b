"""Golden rows: for each format the exact ids and labels, written down from a second source.

The expectation is a list of (text, trained) pieces put together by hand and encoded by a few
lines that know nothing of the pipeline (`expect`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ndtrain.data.prepare import Prepared

Piece = tuple[str, bool]
Expect = Callable[[Sequence[Piece]], tuple[list[int], list[int]]]
PrepareRows = Callable[..., Prepared]
END = "<|im_end|>"
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{}\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n"
)


def turn(role: str, text: str, trained: bool = False) -> list[Piece]:
    return [(f"<|im_start|>{role}\n", False), (f"{text}{END}", trained), ("\n", False)]


def only_row(prepared: Prepared) -> tuple[list[int], list[int]]:
    assert len(prepared.train) == 1
    ids, labels = prepared.train.row(0)
    return ids.tolist(), labels.tolist()


MAPPING = {
    "system_prompt": "Be {brief}.",
    "system_format": "S: {system}\\n",
    "field_instruction": "question",
    "field_input": "context",
    "field_output": "answer",
    "format": "Q: {instruction}\\nC: {input}\\nA: ",
    "no_input_format": "Q: {instruction}\\nA: ",
}
CALL = {"name": "area", "arguments": {"r": 2}}
CALL_TEXT = '{"name": "area", "arguments": {"r": 2}}'
TOOL = {"name": "area", "description": "Of a circle.", "parameters": {"type": "object"}}
TOOLS_TEXT = (
    "You can call the functions below. To call one, answer with a JSON object that has its "
    '"name" and its "arguments", and nothing else.\n'
    '{"type": "function", "function": {"name": "area", "description": "Of a circle.", '
    '"parameters": {"type": "object"}}}'
)
GOLDEN: dict[str, tuple[Any, dict[str, Any], list[Piece], dict[str, Any]]] = {
    "alpaca": (
        "alpaca",
        {"instruction": "Add {1} and 2.", "input": "", "output": "3"},
        [(ALPACA.format("Add {1} and 2."), False), ("3" + END, True)],
        {},
    ),
    "alpaca with input": (
        "alpaca",
        {"instruction": "Add.", "input": "1 and {instruction}", "output": "Ä\n"},
        [(ALPACA_INPUT.format("Add.", "1 and {instruction}"), False), ("Ä\n" + END, True)],
        {},
    ),
    "alpaca without the column input": (
        "alpaca",
        {"instruction": "Go", "output": "Gone"},
        [(ALPACA.format("Go"), False), ("Gone" + END, True)],
        {},
    ),
    "alpaca, prompt trained": (
        "alpaca",
        {"instruction": "Go", "input": None, "output": "Gone"},
        [(ALPACA.format("Go") + "Gone" + END, True)],
        {"train_on_inputs": True},
    ),
    "mapping": (
        MAPPING,
        {"question": "Why?", "context": "Rain.", "answer": "So."},
        [("S: Be {brief}.\nQ: Why?\nC: Rain.\nA: ", False), ("So." + END, True)],
        {},
    ),
    "mapping without input": (
        MAPPING,
        {"question": "Why?", "system": "Row's own.", "answer": "So."},
        [("S: Row's own.\nQ: Why?\nA: ", False), ("So." + END, True)],
        {},
    ),
    "completion": ("completion", {"text": "Once upon"}, [("Once upon" + END, True)], {}),
    "completion from another column": (
        "completion",
        {"body": "Once"},
        [("Once" + END, True)],
        {"entry": {"field": "body"}},
    ),
    "input_output": (
        "input_output",
        {"segments": [{"text": "<|im_start|>Q", "label": False}, {"text": "A", "label": True}]},
        [("<|im_start|>Q", False), ("A", True)],
        {},
    ),
    "messages": (
        "chat_template",
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]},
        [*turn("user", "Hi"), *turn("assistant", "Yo", True)],
        {},
    ),
    "sharegpt": (
        "sharegpt",
        {
            "conversations": [
                {"from": "system", "value": "S"},
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Yo"},
                {"from": "human", "value": "More"},
                {"from": "gpt", "value": "No"},
            ]
        },
        [
            *turn("system", "S"),
            *turn("user", "Hi"),
            *turn("assistant", "Yo", True),
            *turn("user", "More"),
            *turn("assistant", "No", True),
        ],
        {},
    ),
    "a backslash in the data stays": (
        {**MAPPING, "system_prompt": "Be\\nbrief."},
        {"system": "a\\nb", "question": "c\\nd", "answer": "e\\nf"},
        [("S: a\\nb\nQ: c\\nd\nA: ", False), ("e\\nf" + END, True)],
        {},
    ),
    "a backslash-n of the recipe is a line break": (
        {**MAPPING, "system_prompt": "Be\\nbrief."},
        {"question": "c", "answer": "e"},
        [("S: Be\nbrief.\nQ: c\nA: ", False), ("e" + END, True)],
        {},
    ),
    "mapped keys and roles": (
        "chat_template",
        {"talk": [{"who": "visitor", "says": "Hi"}, {"who": "guide", "says": "Yo"}]},
        [*turn("user", "Hi"), *turn("assistant", "Yo", True)],
        {
            "entry": {
                "field_messages": "talk",
                "message_property_mappings": {"role": "who", "content": "says"},
                "roles": {"user": ["visitor"], "assistant": ["guide"]},
            }
        },
    ),
    "switches of turns": (
        "chat_template",
        {
            "messages": [
                {"role": "user", "content": "Hi", "train": True},
                {"role": "assistant", "content": "Yo", "weight": 0},
                {"role": "user", "content": "More"},
                {"role": "assistant", "content": "No", "weight": 1},
            ]
        },
        [
            *turn("user", "Hi", True),
            *turn("assistant", "Yo"),
            *turn("user", "More"),
            *turn("assistant", "No", True),
        ],
        {},
    ),
    "parts": (
        "chat_template",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi "}, "you"]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "wrong ", "train": False},
                        {"type": "text", "text": "right"},
                    ],
                },
            ]
        },
        [
            *turn("user", "Hi you"),
            ("<|im_start|>assistant\nwrong ", False),
            ("right" + END, True),
            ("\n", False),
        ],
        {},
    ),
    "no end tokens": (
        "chat_template",
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]},
        [
            *turn("user", "Hi"),
            ("<|im_start|>assistant\n", False),
            ("Yo", True),
            (END + "\n", False),
        ],
        {"entry": {"train_on_eos": "none"}},
    ),
    "all end tokens": (
        "chat_template",
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]},
        [
            ("<|im_start|>user\nHi", False),
            (END, True),
            ("\n", False),
            *turn("assistant", "Yo", True),
        ],
        {"entry": {"train_on_eos": "all"}},
    ),
    "last end token": (
        "chat_template",
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d"},
            ]
        },
        [
            *turn("user", "a"),
            ("<|im_start|>assistant\n", False),
            ("b", True),
            (END + "\n", False),
            *turn("user", "c"),
            *turn("assistant", "d", True),
        ],
        {"entry": {"train_on_eos": "last"}},
    ),
    "empty answer trains its end": (
        "chat_template",
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]},
        [*turn("user", "Hi"), *turn("assistant", "", True)],
        {},
    ),
    "system dropped, default added": (
        "chat_template",
        {
            "messages": [
                {"role": "system", "content": "old"},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Yo"},
            ]
        },
        [*turn("system", "new"), *turn("user", "Hi"), *turn("assistant", "Yo", True)],
        {"entry": {"drop_system_message": True}, "default_system_message": "new"},
    ),
    "tools and calls": (
        "chat_template",
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"type": "function", "function": {"name": "area", "arguments": '{"r": 2}'}}
                    ],
                },
                {"role": "tool", "content": '{"a": 12}'},
                {"role": "assistant", "content": "12"},
            ],
            "tools": [{"type": "function", "function": TOOL}],
        },
        [
            *turn("system", TOOLS_TEXT),
            *turn("user", "Hi"),
            *turn("assistant", CALL_TEXT, True),
            *turn("tool", '{"a": 12}'),
            *turn("assistant", "12", True),
        ],
        {},
    ),
    "reasoning": (
        "chat_template",
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Yo", "reasoning_content": "Greet."},
            ]
        },
        [*turn("user", "Hi"), *turn("assistant", "<think>\nGreet.\n</think>\n\nYo", True)],
        {},
    ),
    "reasoning before parts with switches": (
        "chat_template",
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "content": [{"text": "Old.", "train": False}, {"text": " New.", "train": True}],
                    "reasoning_content": "Greet.",
                },
            ]
        },
        [
            *turn("user", "Hi"),
            ("<|im_start|>assistant\n", False),
            ("<think>\nGreet.\n</think>\n\n", True),
            ("Old.", False),
            (" New." + END, True),
            ("\n", False),
        ],
        {},
    ),
    "preference trains the chosen answer": (
        "chat_template",
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "Good"},
            "rejected": {"from": "gpt", "value": "Bad"},
        },
        [*turn("user", "Hi"), *turn("assistant", "Good", True)],
        {},
    ),
    "preference with texts": (
        "chat_template",
        {"prompt": "Hi", "chosen": "Good", "rejected": "Bad"},
        [*turn("user", "Hi"), *turn("assistant", "Good", True)],
        {},
    ),
    "preference with whole conversations": (
        "chat_template",
        {
            "chosen": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good"}],
            "rejected": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "B"}],
        },
        [*turn("user", "Hi"), *turn("assistant", "Good", True)],
        {},
    ),
    "everything trained": (
        "chat_template",
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]},
        [("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n", True)],
        {"train_on_inputs": True},
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_ids_and_labels(name: str, prepare_rows: PrepareRows, expect: Expect) -> None:
    kind, row, pieces, keys = GOLDEN[name]
    assert only_row(prepare_rows([row], kind, **keys)) == expect(pieces)


@pytest.mark.parametrize(
    ("calls", "spoken"),
    [
        (CALL_TEXT, CALL_TEXT),
        ('[{"name": "f", "arguments": {}}]', '{"name": "f", "arguments": {}}'),
    ],
)
def test_sharegpt_function_calls(
    prepare_rows: PrepareRows, expect: Expect, calls: str, spoken: str
) -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "function_call", "value": calls},
            {"from": "observation", "value": "12"},
            {"from": "gpt", "value": "It is 12."},
        ],
        "tools": f"[{TOOLS_TEXT.splitlines()[1]}]",
    }
    assert only_row(prepare_rows([row], "sharegpt")) == expect(
        [
            *turn("system", TOOLS_TEXT),
            *turn("user", "Hi"),
            *turn("assistant", spoken, True),
            *turn("tool", "12"),
            *turn("assistant", "It is 12.", True),
        ]
    )
