"""What no tokenizer, template or reader can take is a bad row like any other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ndtrain.data.prepare import Prepared
from ndtrain.errors import DataError

PrepareFile = Callable[..., Prepared]
HALF = json.loads(r'"\ud83d"')


def jinja(text: str) -> dict[str, str]:
    return {"chat_template": "jinja", "chat_template_jinja": text}


def talk(*contents: str, **more: Any) -> dict[str, Any]:
    turns = [
        {"role": role, "content": content}
        for role, content in zip(("user", "assistant"), contents, strict=True)
    ]
    return {"messages": turns, **more}


PLAIN = "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
CASES: list[tuple[str, str, str, dict[str, Any], str]] = [
    # type, a good row, a bad row, keys, what is said
    ("completion", '{"text": "ab"}', r'{"text": "a\ud83d"}', {}, "half of a character"),
    (
        "completion",
        '{"text": "ab"}',
        '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}",
        {},
        "brackets are nested too deep",
    ),
    (
        "completion",
        '{"text": "ab"}',
        '{"text": ' + "9" * 5000 + "}",
        {},
        "a number has thousands of digits",
    ),
    (
        "chat_template",
        json.dumps(talk("a", "b")),
        json.dumps({"messages": json.dumps(talk("a", HALF)["messages"])}),
        {},
        "half of a character",
    ),
    (
        "chat_template",
        json.dumps(talk("a", "b")),
        json.dumps(talk("a", "b", tools="[" * 100_000)),
        {},
        "brackets are nested too deep",
    ),
    (
        "chat_template",
        json.dumps(talk("a", "b")),
        json.dumps(talk("zero", "b")),
        jinja("{% if messages[0].content == 'zero' %}{{ 1 / 0 }}{% endif %}" + PLAIN),
        "the chat template refuses the row: ZeroDivisionError: division by zero",
    ),
    (
        "chat_template",
        json.dumps(talk("zz", "b")),
        json.dumps(talk("a", "b")),
        jinja("{% set at = messages[0].content.index('zz') %}" + PLAIN),
        "the chat template refuses the row: ValueError: substring not found",
    ),
    ("", '{"input_ids": [1, 2]}', '{"input_ids": [1, 2], "labels": [1, 259]}', {}, "label 259 is"),
    (
        "",
        '{"input_ids": [1, 2]}',
        f'{{"input_ids": [1, 2], "labels": [1, {2**40}]}}',
        {},
        f"label {2**40} is outside the vocabulary of 259",
    ),
    (
        "",
        '{"input_ids": [1, 2]}',
        f'{{"input_ids": [1, {2**40}]}}',
        {},
        f"token id {2**40} is outside the vocabulary of 259",
    ),
]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("kind", "good", "bad", "keys", "message"), CASES)
def test_it_is_named_or_left_out(
    kind: str,
    good: str,
    bad: str,
    keys: dict[str, Any],
    message: str,
    processes: int,
    tmp_path: Path,
    prepare_file: PrepareFile,
) -> None:
    path = tmp_path / "rows.jsonl"
    count = 5 if processes == 1 else 4200
    path.write_text("\n".join([*[good] * count, bad, good]))
    with pytest.raises(DataError) as caught:
        prepare_file(path, kind, dataset_num_proc=processes, **keys)
    assert message in caught.value.message
    assert caught.value.where == f"{path}:{count + 1}"

    entry = {"on_bad_row": "skip"}
    kept = prepare_file(path, kind, dataset_num_proc=processes, entry=entry, **keys)
    assert len(kept.train) == count + 1
    assert kept.report.sources[0].dropped == {"could not be used": 1}
    assert message in kept.report.sources[0].examples["could not be used"]


@pytest.mark.parametrize(
    ("name", "content", "line", "message"),
    [
        ("rows.csv", b"text\nab\nc,d\nef\n", 3, "more cells than the 1 columns"),
        ("rows.csv", b"text\nab\nc\xe9\nef\n", 3, "byte 0xe9 is not UTF-8"),
        ("rows.json", b'[{"text": "ab"},\n5,\n{"text": "ef"}]', 2, "this is a number"),
        ("rows.txt", b"ab\nc\xe9\nef\n", 2, "byte 0xe9 is not UTF-8"),
    ],
)
def test_a_row_that_its_reader_refuses_is_left_out(
    name: str,
    content: bytes,
    line: int,
    message: str,
    tmp_path: Path,
    prepare_file: PrepareFile,
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        prepare_file(path, "completion")
    assert caught.value.where == f"{path}:{line}"
    kept = prepare_file(path, "completion", entry={"on_bad_row": "skip"})
    assert [kept.train.row(place)[0].tolist() for place in range(2)] == [
        [97, 98, 258],
        [101, 102, 258],
    ]
    assert kept.report.sources[0].rows_in == 3
    assert kept.report.sources[0].dropped == {"could not be used": 1}


def test_no_number_is_an_empty_input(
    tmp_path: Path, prepare_file: PrepareFile, expect: Any
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"instruction": "a", "input": NaN, "output": true}\n')
    kind = {"format": "{instruction}|{input}", "no_input_format": "{instruction}:"}
    ids, labels = prepare_file(path, kind).train.row(0)
    assert (ids.tolist(), labels.tolist()) == expect([("a:", False), ("true<|im_end|>", True)])
