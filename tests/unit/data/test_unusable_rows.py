"""Rows that cannot be used, have nothing to train or are too long: refused, or counted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ndtrain.data.prepare import Prepared
from ndtrain.data.preview import describe_data
from ndtrain.data.report import rows_notes
from ndtrain.errors import DataError, ExitCode

PrepareRows = Callable[..., Prepared]
ALPACA = {"instruction": "i", "output": "o"}


def messages(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


TALK = messages(("user", "Hi"), ("assistant", "Yo"))


def contents(prepared: Prepared) -> list[tuple[list[int], list[int]]]:
    rows = prepared.train
    return [
        (rows.row(place)[0].tolist(), rows.row(place)[1].tolist()) for place in range(len(rows))
    ]


@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        ({"instruction": "i"}, "alpaca", "column 'output' is missing"),
        ({"instruction": "i", "output": ""}, "alpaca", "column 'output' is empty"),
        ({"instruction": "i", "output": None}, "alpaca", "column 'output' is null"),
        ({"text": None}, "completion", "column 'text' is null"),
        ({"input_ids": [1, "2"]}, None, "must be a list of whole numbers"),
        ({"input_ids": [1, 2], "labels": [1]}, None, "'labels' has 1 items, 'input_ids' has 2"),
        ({"input_ids": [1, 99999]}, None, "token id 99999 is outside the vocabulary of 259"),
        ({"input_ids": [1, -2]}, None, "token 1 has id -2"),
        ({"text": "x"}, None, "column 'input_ids' is missing"),
        ({"text": "x"}, "chat_template", "no column of turns"),
        (
            {"prompt": [{"role": "assistant", "content": "old"}]},
            "chat_template",
            "column 'prompt' has no answer beside it: neither 'completion' nor 'chosen'",
        ),
        ({"completion": "x"}, "chat_template", "no column of turns"),
        ({"messages": "Hi"}, "chat_template", "column 'messages' must be a list of turns"),
        ({"messages": [{"content": "x"}]}, "chat_template", "a turn has no role under 'role'"),
        (messages(("user", "a"), ("assistant", None)), "chat_template", "is missing or null"),
        (messages(("user", 3), ("assistant", "b")), "chat_template", "must be text or a list"),
        (
            messages(("user", [{"type": "image", "url": "x"}]), ("assistant", "b")),
            "chat_template",
            "a part of type 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "train": "yes"}]},
            "chat_template",
            "it must be true or false, 1 or 0",
        ),
        (
            messages(("user", "a"), ("assistant", [{"text": "b", "train": "false"}])),
            "chat_template",
            "'train' of a part is 'false'; it must be true or false, 1 or 0",
        ),
        ({**TALK, "tools": "[{"}, "chat_template", "column 'tools' is not valid JSON"),
        ({**TALK, "tools": 7}, "chat_template", "must be a list of tool definitions"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"x": 1}]}]},
            "chat_template",
            "a tool call has no function name",
        ),
        ({"segments": [{"text": "x"}]}, "input_output", "is not {text: text, label"),
        ({"segments": "x"}, "input_output", "must be a list of {text, label}"),
    ],
)
def test_a_row_that_cannot_be_used(
    row: Any, kind: Any, message: str, prepare_rows: PrepareRows, tmp_path: Path
) -> None:
    good: Any = {
        "alpaca": ALPACA,
        "completion": {"text": "fine"},
        None: {"input_ids": [1, 2]},
        "chat_template": TALK,
        "input_output": {"segments": [{"text": "ab", "label": True}]},
    }[kind]
    with pytest.raises(DataError) as caught:
        prepare_rows([good, good, row, good], kind)
    assert message in str(caught.value)
    assert caught.value.where == f"{tmp_path / 'rows.jsonl'}:3"
    assert caught.value.exit_code is ExitCode.DATA

    kept = prepare_rows([good, good, row, good], kind, entry={"on_bad_row": "skip"})
    assert len(kept.train) == 3
    assert kept.report.sources[0].dropped == {"could not be used": 1}
    assert message in kept.report.sources[0].examples["could not be used"]


@pytest.mark.parametrize(
    ("broken", "further"),
    [
        ((2,), ""),
        ((2, 4), " Unusable too: {rows}:4."),
        (range(2, 7), " Unusable too: {rows}:3, {rows}:4, {rows}:5, {rows}:6."),
        (range(2, 9), " Unusable too: {rows}:3, {rows}:4, {rows}:5, {rows}:6 and more."),
    ],
)
def test_rows_after_the_first_unusable_one_are_named(
    broken: Any, further: str, prepare_rows: PrepareRows, tmp_path: Path
) -> None:
    rows = [{"instruction": "i"} if line in broken else ALPACA for line in range(1, 10)]
    with pytest.raises(DataError) as caught:
        prepare_rows(rows)
    first = (
        "{rows}:2: column 'output' is missing. Columns of this row: 'instruction'. Name another "
        "with type: {{field_output: ...}}. Leave such rows out with on_bad_row: skip."
    )
    assert str(caught.value) == (first + further).format(rows=tmp_path / "rows.jsonl")


def test_roles_that_nobody_knows_are_warned_of(prepare_rows: PrepareRows, tmp_path: Path) -> None:
    rows = [
        TALK,
        messages(("usr", "a"), ("assistant", "b")),
        messages(("usr", "a"), ("usr", "a"), ("assistant", "b"), ("foo", "c")),
        messages(("human", "a"), ("gpt", "b"), ("tool", "c"), ("assistant", "d")),
    ]
    report = prepare_rows(rows, "chat_template", chat_template="chatml").report
    place = tmp_path / "rows.jsonl"
    usr = "with the unknown role 'usr'; did you mean 'user'?"
    foo = "with the unknown role 'foo'; name it in the dataset's roles"
    assert report.sources[0].warnings == {usr: 2, foo: 1}
    assert rows_notes(report)[1:] == (
        f"{place}: 2 rows {usr} (first: {place}:2)",
        f"{place}: a row {foo} ({place}:3)",
    )
    assert f"  warning: 2 {usr} (first: {place}:2)" in list(describe_data(report))

    known = {"roles": {"user": ["usr"], "foo": ["foo"]}}
    named = prepare_rows(rows, "chat_template", chat_template="chatml", entry=known).report
    assert named.sources[0].warnings == {}


def test_a_role_that_the_template_names_is_known(prepare_rows: PrepareRows) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'ipython' %}#{% endif %}"
        "{{ '<' + m.role + '>' + m.content + '<|im_end|>' }}{% endfor %}"
    )
    row = messages(("user", "a"), ("ipython", "b"), ("assistant", "c"))
    report = prepare_rows([row], "chat_template", chat_template_jinja=template).report
    assert report.sources[0].warnings == {}


def test_a_misspelt_role_without_which_nothing_is_trained_is_the_hint(
    prepare_rows: PrepareRows, tmp_path: Path
) -> None:
    row = messages(("user", "a"), ("asistant", "b"))
    with pytest.raises(DataError) as caught:
        prepare_rows([row], "chat_template", chat_template="chatml")
    assert caught.value.hint == (
        "There are rows with the unknown role 'asistant'; did you mean 'assistant'? "
        f"(first: {tmp_path / 'rows.jsonl'}:1)"
    )


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("gemma", messages(("user", "a"), ("user", "b"), ("assistant", "c"))),
        ("mistral", messages(("assistant", "a"), ("user", "b"), ("assistant", "c"))),
        ("mistral", messages(("user", "a"), ("tool", "b"), ("assistant", "c"))),
    ],
)
def test_roles_that_the_template_refuses(
    name: str, row: Any, prepare_rows: PrepareRows, tmp_path: Path
) -> None:
    roles = " ".join(turn["role"] for turn in row["messages"])
    with pytest.raises(DataError) as caught:
        prepare_rows([TALK, row], "chat_template", chat_template=name)
    assert caught.value.where == f"{tmp_path / 'rows.jsonl'}:2"
    assert f"Roles of the row: {roles}." in caught.value.message
    assert "on_bad_row: skip" in caught.value.hint


@pytest.mark.parametrize(
    "row",
    [
        messages(),
        messages(("system", "s")),
        messages(("user", "a")),
        messages(("system", "s"), ("user", "a")),
    ],
    ids=["empty", "system", "user", "system-user"],
)
def test_rows_without_an_answer_are_dropped_and_counted(
    row: Any, prepare_rows: PrepareRows
) -> None:
    prepared = prepare_rows([TALK, row], "chat_template")
    assert len(prepared.train) == 1
    assert prepared.report.sources[0].dropped == {"no trained token": 1}


@pytest.mark.parametrize(
    ("rows", "kind", "keys", "message"),
    [
        ([messages(("user", "a"))] * 2, "chat_template", {}, "2 no trained token (first: "),
        ([ALPACA] * 3, "alpaca", {"sequence_len": 8}, "3 longer than sequence_len (first: "),
        (
            [{"instruction": "x" * 90, "output": "o"}],
            "alpaca",
            {"sequence_len": 64, "excess_length_strategy": "truncate"},
            "1 no trained token",
        ),
        ([{"text": ""}], "completion", {}, "1 under min_sample_len tokens"),
        ([], "completion", {}, "the dataset has no rows"),
    ],
)
def test_a_dataset_with_nothing_left_is_refused(
    rows: Any, kind: str, keys: Any, message: str, prepare_rows: PrepareRows
) -> None:
    with pytest.raises(DataError) as caught:
        prepare_rows(rows, kind, **keys)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "lengths", "dropped", "changed"),
    [
        ("drop", [4], {"longer than sequence_len": 1}, {}),
        ("truncate", [4, 8], {}, {"truncated": 1}),
        ("split", [4, 8, 8, 3], {"no trained token": 1}, {"split": 1}),
    ],
)
def test_lengths(
    strategy: str, lengths: list[int], dropped: Any, changed: Any, prepare_rows: PrepareRows
) -> None:
    """Nineteen tokens in rows of eight; a split keeps every piece that trains something."""
    rows = [{"input_ids": [1, 2, 3, 4]}, {"input_ids": list(range(1, 20))}]
    if strategy == "split":
        rows.append({"input_ids": list(range(1, 9)), "labels": [-100] * 8})
    prepared = prepare_rows(rows, None, sequence_len=8, excess_length_strategy=strategy)
    assert prepared.train.lengths.tolist() == lengths
    assert prepared.report.sources[0].dropped == dropped
    assert prepared.report.sources[0].changed == changed


def test_too_long_can_be_an_error(prepare_rows: PrepareRows, tmp_path: Path) -> None:
    rows = [{"text": "ab"}, {"text": "c" * 20}]
    with pytest.raises(DataError, match="the row has 21 tokens, sequence_len is 8") as caught:
        prepare_rows(rows, "completion", sequence_len=8, excess_length_strategy="raise")
    assert caught.value.where == f"{tmp_path / 'rows.jsonl'}:2"


def test_long_texts_become_rows_whatever_the_strategy(prepare_rows: PrepareRows) -> None:
    prepared = prepare_rows([{"text": "abcdefghij"}], "completion", sequence_len=4)
    rows = [ids for ids, _ in contents(prepared)]
    assert rows == [[97, 98, 99, 100], [101, 102, 103, 104], [105, 106, 258]]


def test_one_token_rows_are_dropped(prepare_rows: PrepareRows) -> None:
    prepared = prepare_rows([{"input_ids": [1]}, {"input_ids": [1, 2]}], None)
    assert prepared.report.sources[0].dropped == {"under min_sample_len tokens": 1}
