"""Conversations: messages, ShareGPT turns, tool calls, the chosen side of preferences."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from ndtrain.data.formats.tools import read_tool_calls, read_tools
from ndtrain.data.json_text import load_json
from ndtrain.data.rows import Row
from ndtrain.data.sample import Chat, Segment, Turn
from ndtrain.recipe.schema import DatasetSpec

ROLES: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}
"""Names of speakers in data, and the roles that templates know them by."""


def read_chat(row: Row, spec: DatasetSpec) -> Chat:
    """The turns of a row and its tools; of a prompt with an answer, only the answer is trained."""
    messages, before = _messages(row, spec)
    names = _property_names(row, spec, messages)
    turns = [_turn(row, spec, names, message) for message in messages]
    for place, turn in enumerate(turns[:before]):
        if turn.trained is None:  # a switch of its own stands
            turns[place] = replace(turn, trained=False)
    system = row.data.get("system")
    if isinstance(system, str) and system and not any(turn.role == "system" for turn in turns):
        turns.insert(0, Turn("system", system))
    if spec.drop_system_message:
        turns = [turn for turn in turns if turn.role != "system"]
    return Chat(
        tuple(turns),
        read_tools(row, spec.field_tools),
        is_preference=row.data.get("chosen") is not None,
    )


def _messages(row: Row, spec: DatasetSpec) -> tuple[Sequence[Mapping[str, Any]], int]:
    """The turns as the row has them, its answer last, and the number of turns before the answer.

    The answer is the chosen side of a preference row, or the completion of a prompt. Without one
    no turn stands before it.
    """
    data = row.data
    column = spec.field_messages or next(
        (name for name in ("messages", "conversations", "conversation") if name in data), None
    )
    prompt = data.get("prompt") if column in (None, "prompt") else None
    answers = ("chosen", "completion") if prompt is not None else ("chosen",)
    answer = next((name for name in answers if data.get(name) is not None), None)
    if isinstance(prompt, str) and answer is not None:
        return _with_answer(row, [{"role": "user", "content": prompt}], answer)
    if column is None and prompt is not None:
        if answer is None:
            raise row.fail(
                "column 'prompt' has no answer beside it: neither 'completion' nor 'chosen'.",
                "Add one of them; where the prompt is the whole conversation, set "
                "field_messages: prompt.",
            )
        column = "prompt"
    if column is None and answer is None:
        known = ", ".join(f"'{name}'" for name in data) or "none"
        raise row.fail(
            "no column of turns: neither 'messages' nor 'conversations'.",
            f"Columns of this row: {known}. Name one with field_messages, or set another type.",
        )
    turns = [] if column is None else _list_of_turns(row, column)
    return (turns, 0) if answer is None else _with_answer(row, turns, answer)


def _with_answer(row: Row, turns: list[Any], answer: str) -> tuple[list[Any], int]:
    """The turns with an answer behind them, and how many stand before it."""
    given = row.data[answer]
    if isinstance(given, str):
        return [*turns, {"role": "assistant", "content": given}], len(turns)
    if isinstance(given, dict):
        return [*turns, given], len(turns)
    whole = _list_of_turns(row, answer)
    if whole[: len(turns)] != turns:
        return [*turns, *whole], len(turns)
    rejected = row.data.get("rejected")
    pairs = zip(whole, rejected if isinstance(rejected, list) else (), strict=False)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return whole, max(len(turns), shared)


def _list_of_turns(row: Row, column: str) -> list[Any]:
    """A column that must be a list of objects, or JSON text of one."""
    value = row.data.get(column)
    if isinstance(value, str):
        try:
            value = load_json(value)
        except json.JSONDecodeError:
            value = None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise row.fail(f"column '{column}' must be a list of turns.")
    return value


def _property_names(
    row: Row, spec: DatasetSpec, messages: Sequence[Mapping[str, Any]]
) -> Mapping[str, str]:
    """Which key of a turn holds its role and which its content."""
    names: dict[str, str] = {}
    if messages:
        first = messages[0]
        for target, choices in (("role", ("role", "from")), ("content", ("content", "value"))):
            names[target] = next((name for name in choices if name in first), choices[0])
    return names | (spec.message_property_mappings or {})


def _turn(
    row: Row, spec: DatasetSpec, names: Mapping[str, str], message: Mapping[str, Any]
) -> Turn:
    """One turn, its role translated and its content joined to text."""
    spoken, content = message.get(names["role"]), message.get(names["content"])
    if spoken is None and content is None:  # the chosen answer may be spelt the other way
        spoken = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
    if not isinstance(spoken, str):
        raise row.fail(
            f"a turn has no role under '{names['role']}': its keys are {', '.join(message)}.",
            "Name the keys with message_property_mappings.",
        )
    role = _target_role(row, spec, spoken)
    extra = {
        target: message[source]
        for target, source in names.items()
        if target not in ("role", "content") and message.get(source) is not None
    }
    if message.get(spec.field_thinking) is not None:
        extra["reasoning_content"] = message[spec.field_thinking]
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            extra[key] = message[key]
    calls = message.get("tool_calls")
    if spoken == "function_call":
        calls, content = content, ""
    if calls:
        extra["tool_calls"] = read_tool_calls(row, calls)
    text, parts = _content(row, content, spoken, has_calls="tool_calls" in extra)
    wish = _switch(row, (spec.message_field_training, "weight"), "turn", message)
    return Turn(role, text, wish, parts, extra)


def _target_role(row: Row, spec: DatasetSpec, spoken: str) -> str:
    """The role under which the template knows a speaker."""
    for target, sources in (spec.roles or {}).items():
        if spoken in sources or spoken == target:
            return target
    return ROLES.get(spoken, spoken)


def _switch(row: Row, keys: Sequence[str], of: str, values: Mapping[str, Any]) -> bool | None:
    """The wish of a turn or a part of one to be trained: its flag, or a weight of 0 or 1.

    Args:
        of: what has the keys, for the message.
    """
    for key in keys:
        value = values.get(key)
        if value is None:
            continue
        if value not in (0, 1):
            raise row.fail(f"'{key}' of a {of} is {value!r}; it must be true or false, 1 or 0.")
        return bool(value)
    return None


def _content(
    row: Row, content: Any, spoken: str, has_calls: bool
) -> tuple[str, tuple[Segment, ...]]:
    """The text of a turn and, where its parts have switches, the parts."""
    if isinstance(content, str):
        return content, ()
    if content is None:
        if has_calls:
            return "", ()
        raise row.fail(f"the content of a '{spoken}' turn is missing or null.")
    if isinstance(content, dict) and spoken in ("tool", "observation", "function"):
        return json.dumps(content, ensure_ascii=False), ()
    if not isinstance(content, list):
        raise row.fail(f"the content of a '{spoken}' turn must be text or a list of parts.")
    parts: list[Segment] = []
    switched = False
    for part in content:
        text = part if isinstance(part, str) else None
        if isinstance(part, dict) and part.get("type", "text") == "text":
            text = part.get("text", part.get("content"))
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise row.fail(
                f"a part of type {kind!r} in a '{spoken}' turn is not text.",
                "Only text is trained; remove images and other media.",
            )
        values = part if isinstance(part, dict) else {}
        wish = _switch(row, ("train", "weight"), "part", values)
        switched |= wish is not None
        parts.append(Segment(text, trained=wish is not False))
    return "".join(part.text for part in parts), tuple(parts) if switched else ()
