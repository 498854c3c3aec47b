"""Finds the chat template that a recipe names and learns what it can express by rendering probes.

What a template does with tools, tool calls and reasoning cannot be read from its text with any
certainty, so a probe is rendered and the result searched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from ndtrain.data.chat_template import CallStyle, ChatTemplate, TemplateRefusal
from ndtrain.data.sample import Chat, Turn
from ndtrain.data.templates.catalog import TEMPLATES
from ndtrain.errors import RecipeError
from ndtrain.recipe.template_choice import template_path

_ANSWER = "7183920465"
_VALUE = "5640293817"
_CALL_STYLES = (
    CallStyle(),
    CallStyle(null_content=True),
    CallStyle(null_content=True, text_arguments=True),
    CallStyle(text_arguments=True),
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "function_probe",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
_CALL = {"type": "function", "function": {"name": "function_probe", "arguments": {"key": _VALUE}}}


def build_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    jinja: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """The template that a recipe names, with its end markers found by rendering a probe.

    Args:
        name: tokenizer_default, a family's name, jinja, or tokenizer_default_fallback_<name>.
        jinja: template text or the address of a file with it, for the name `jinja`.

    Raises:
        RecipeError: the name is unknown, the tokenizer has no template, or it is not valid Jinja.
    """
    source = _template_source(tokenizer, name, jinja)
    given = {**tokenizer.special_tokens_map, **(variables or {})}
    template = ChatTemplate(source, given)
    _check_syntax(template)
    return probe_template(template, tokenizer)


def _check_syntax(template: ChatTemplate) -> None:
    """Refuse a template that no conversation can be rendered by."""
    try:
        template.render([{"role": "user", "content": "question"}], ())
    except TemplateRefusal as refusal:
        cause = refusal.__cause__
        if isinstance(cause, TemplateSyntaxError):
            raise RecipeError(
                f"the chat template is not valid Jinja: {refusal}".rstrip(".")
                + f" (line {cause.lineno} of the template).",
                hint="Correct the template.",
            ) from None


def _template_source(tokenizer: PreTrainedTokenizerBase, name: str, jinja: str | None) -> str:
    """The template text behind a name."""
    fallback = name.removeprefix("tokenizer_default_fallback_")
    if name == "jinja" or (jinja and name == "tokenizer_default"):
        if not jinja:
            raise RecipeError("chat_template: jinja needs chat_template_jinja.")
        path = template_path(jinja)
        if path is None:
            return jinja
        if not path.is_file():
            raise RecipeError(f"template file '{jinja}' does not exist.")
        return path.read_text(encoding="utf-8")
    if name == "tokenizer_default" or fallback != name:
        if tokenizer.chat_template:
            return str(tokenizer.get_chat_template())
        if fallback == name:
            raise RecipeError(
                "the tokenizer has no chat template.",
                hint=f"Choose one: {', '.join(TEMPLATES)}, or jinja with chat_template_jinja.",
            )
        name = fallback
    if name not in TEMPLATES:
        known = ", ".join(["tokenizer_default", *TEMPLATES, "jinja"])
        raise RecipeError(f"chat template '{name}' is unknown.", hint=f"Use {known}.")
    return TEMPLATES[name]


def probe_template(template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """The template with what it can express filled in."""
    user = Turn("user", "question")
    plain = Chat((user, Turn("assistant", _ANSWER)))
    special = sorted({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}, key=len)
    with_tools = _try(template, plain.turns, [_TOOL])
    thinking = Turn("assistant", _ANSWER, extra={"reasoning_content": _VALUE, "thinking": _VALUE})
    with_thought = _try(template, (user, thinking))
    calling = (user, Turn("assistant", "", extra={"tool_calls": [_CALL]}))
    markers = [
        _marker_after(_try(template, turns), special)
        for turns in (plain.turns, (*plain.turns, user))
    ]
    found = replace(
        template,
        reads_tools="function_probe" in with_tools,
        reads_reasoning=_VALUE in with_thought,
    )
    for style in _CALL_STYLES:
        styled = replace(found, call_style=style)
        text = _try(styled, calling, [_TOOL])
        if _VALUE in text and "function_probe" in text.replace(str(_TOOL), ""):
            found = styled
            ending = [token for token in special if token and text.rstrip().endswith(token)]
            markers += ending[-1:]
            break
    if not any(markers):  # no special token: take the word that follows the answer
        words = _try(template, plain.turns).rpartition(_ANSWER)[2].split()
        markers = words[:1]
    return replace(
        found, end_markers=tuple(sorted({m for m in markers if m}, key=len, reverse=True))
    )


def _try(template: ChatTemplate, turns: Sequence[Turn], tools: Sequence[Any] = ()) -> str:
    """The rendering of a probe; empty where the template refuses it."""
    try:
        return template.render(template.messages_of(Chat(tuple(turns))), tools)
    except TemplateRefusal:
        return ""  # a template that refuses a probe is judged on real rows


def _marker_after(text: str, special: Sequence[str]) -> str:
    """The special token that follows the answer of a probe, empty when there is none."""
    after = text.rpartition(_ANSWER)[2].lstrip() if _ANSWER in text else ""
    return next((token for token in reversed(special) if token and after.startswith(token)), "")
