"""Tool definitions and tool calls: JSON that stays JSON, whatever its keys."""

import json
from collections.abc import Mapping
from typing import Any

from ndtrain.data.json_text import load_json
from ndtrain.data.rows import Row


def read_tools(row: Row, column: str) -> tuple[Mapping[str, Any], ...]:
    """The tool definitions of a row, from a list or from JSON text of one."""
    value = row.data.get(column)
    if value is None or value == "" or value == []:
        return ()
    if isinstance(value, str):
        value = _parse(row, value, f"column '{column}'")
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise row.fail(f"column '{column}' must be a list of tool definitions.")
    tools = []
    for item in value:
        tool = _parse(row, item, f"an item of '{column}'") if isinstance(item, str) else item
        if not isinstance(tool, dict):
            raise row.fail(f"an item of '{column}' is not a tool definition: {item!r}.")
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tuple(tools)


def read_tool_calls(row: Row, calls: Any) -> list[dict[str, Any]]:
    """The calls of a turn; arguments given as JSON text become the object they spell."""
    if isinstance(calls, str):
        calls = _parse(row, calls, "a function call")
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list):
        raise row.fail(f"the tool calls of a turn must be a list, not {calls!r}.")
    return [_call(row, call) for call in calls]


def _call(row: Row, call: Any) -> dict[str, Any]:
    """One call in the shape that chat templates read."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise row.fail(f"a tool call has no function name: {call!r}.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            parsed = load_json(arguments)
        except json.JSONDecodeError:
            parsed = arguments  # some data sets hold free text: it is rendered as it is
        arguments = parsed if isinstance(parsed, dict) else arguments
    if arguments is None:
        arguments = {}
    kept = {key: value for key, value in call.items() if key in ("id", "type") and value}
    return {
        **kept,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _parse(row: Row, text: str, what: str) -> Any:
    """JSON text that must parse."""
    try:
        return load_json(text)
    except json.JSONDecodeError as error:
        raise row.fail(f"{what} is not valid JSON: {error.msg} at position {error.pos}.") from None
