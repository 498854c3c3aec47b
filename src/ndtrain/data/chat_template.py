"""A chat template ready to render conversations, and what it can express.

What a template does not read is written into the text instead of being lost: tool definitions
into the system turn, tool calls and reasoning into the content of their turn.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from ndtrain.data.sample import Chat, Segment, Turn

_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
_TOOLS_TEXT = (
    "You can call the functions below. To call one, answer with a JSON object that has its "
    '"name" and its "arguments", and nothing else.'
)
Messages = list[dict[str, Any]]


class TemplateRefusal(Exception):
    """A template that fails on a conversation; the text says why."""


@dataclass(frozen=True)
class CallStyle:
    """How a template wants a turn that calls a tool: some read calls only without content."""

    null_content: bool = False
    text_arguments: bool = False


@dataclass(frozen=True)
class ChatTemplate:
    """A template, the variables it gets and what it can express.

    Attributes:
        variables: special tokens by their names, and `chat_template_kwargs`.
        end_markers: texts that end a turn, such as <|im_end|>, longest first.
        reads_tools: whether tool definitions reach the text.
        reads_reasoning: whether reasoning text reaches the text.
        call_style: how tool calls reach the text; None when they do not.
    """

    source: str
    variables: Mapping[str, Any]
    end_markers: tuple[str, ...] = ()
    reads_tools: bool = False
    reads_reasoning: bool = False
    call_style: CallStyle | None = None

    @property
    def tracks_answers(self) -> bool:
        """Whether `generation` tags mark what the model writes."""
        return _GENERATION.search(self.source) is not None

    def render(self, messages: Messages, tools: Sequence[Any], prompt: bool = False) -> str:
        """The text of a conversation, with the opening of an answer when `prompt` is set.

        Raises:
            TemplateRefusal: the template fails on the conversation.
        """
        texts, _ = self._run(messages, tools, add_generation_prompt=prompt)
        return str(texts[0])

    def render_tracked(
        self, messages: Messages, tools: Sequence[Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character spans that the template tags as answers.

        Raises:
            TemplateRefusal: the template fails on the conversation.
        """
        texts, spans = self._run(messages, tools, return_assistant_tokens_mask=True)
        return str(texts[0]), list(spans[0])

    def _run(self, messages: Messages, tools: Sequence[Any], **how: bool) -> Any:
        """Render; a template is a program, and may end in any error that Python has."""
        try:
            return render_jinja_template(
                [messages],
                tools=list(tools) or None,
                chat_template=self.source,
                **how,
                **self.variables,
            )
        except TemplateError as error:
            raise TemplateRefusal(str(error)) from error
        except Exception as error:
            raise TemplateRefusal(f"{type(error).__name__}: {error}") from error

    def adapt(self, chat: Chat, default_system: str | None = None) -> Chat:
        """The same conversation with what the template cannot read written into the text."""
        turns = list(chat.turns)
        if default_system and turns and turns[0].role not in ("system", "developer"):
            turns.insert(0, Turn("system", default_system))
        tools = chat.tools
        if tools and not self.reads_tools:
            text = "\n".join([_TOOLS_TEXT, *(_json(tool) for tool in tools)])
            if turns and turns[0].role == "system":
                turns[0] = _around(turns[0], after=f"\n\n{text}", trained=False)
            else:
                turns.insert(0, Turn("system", text))
            tools = ()
        return Chat(tuple(self._adapt_turn(turn) for turn in turns), tools)

    def _adapt_turn(self, turn: Turn) -> Turn:
        """The turn with calls and reasoning that the template does not read as text."""
        extra = dict(turn.extra)
        before = after = ""
        if "reasoning_content" in extra and not self.reads_reasoning:
            before = f"<think>\n{extra.pop('reasoning_content')}\n</think>\n\n"
        if "tool_calls" in extra and self.call_style is None:
            after = "\n".join(_json(call["function"]) for call in extra.pop("tool_calls"))
            after = f"\n{after}" if before or turn.content else after
        return _around(replace(turn, extra=extra), before, after) if before or after else turn

    def messages_of(self, chat: Chat) -> Messages:
        """The conversation as the template expects it."""
        messages: Messages = []
        for turn in chat.turns:
            message: dict[str, Any] = {"role": turn.role, "content": turn.content, **turn.extra}
            style = self.call_style
            if style is not None and "tool_calls" in message:
                message["tool_calls"] = [_styled(call, style) for call in message["tool_calls"]]
                if style.null_content and not turn.content:
                    message["content"] = None
            messages.append(message)
        return messages


def _around(turn: Turn, before: str = "", after: str = "", trained: bool = True) -> Turn:
    """The turn with text around its content; `trained` says whether that is trained with it."""
    parts = (Segment(before, trained), *turn.parts, Segment(after, trained)) if turn.parts else ()
    return replace(turn, content=f"{before}{turn.content}{after}", parts=parts)


def _styled(call: Mapping[str, Any], style: CallStyle) -> dict[str, Any]:
    """A tool call with its arguments as an object or as JSON text."""
    function = dict(call["function"])
    if style.text_arguments and not isinstance(function["arguments"], str):
        function["arguments"] = _json(function["arguments"])
    return {**call, "function": function}


def _json(value: Any) -> str:
    """JSON as templates write it."""
    return json.dumps(value, ensure_ascii=False)
