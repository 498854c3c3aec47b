"""Which characters are trained, over templates that tag answers, that do not, and that rewrite."""

from collections.abc import Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ndtrain.data.chat_mask import MaskError, TrainRules, mark_chat
from ndtrain.data.chat_template import ChatTemplate
from ndtrain.data.sample import Chat, Segment, Turn
from ndtrain.data.template_search import build_chat_template
from ndtrain.data.templates.catalog import TEMPLATES
from ndtrain.errors import RecipeError

ASSISTANT = TrainRules(frozenset({"assistant"}))
END = "<|im_end|>"
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thinks only in the last turn, as several families do: earlier turns are written differently.
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_PROMPT = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED_WITHOUT_END = PLAIN.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}",
)
SHOUTING = PLAIN.replace("{{ m.content }}", "{{ m.content | upper }}")


def template(source: str, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    return build_chat_template(tokenizer, "jinja", source)


def chat(*turns: tuple[str, str]) -> Chat:
    return Chat(tuple(Turn(role, content) for role, content in turns))


def trained(source: ChatTemplate, talk: Chat, rules: TrainRules = ASSISTANT) -> list[str]:
    marked = mark_chat(source, source.adapt(talk), rules)
    return [marked.text[start:end] for start, end in marked.spans]


FOUR = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))


@pytest.mark.parametrize(
    ("source", "spans"),
    [
        (PLAIN, ["b" + END, "d" + END]),
        (TRIMMING, ["b" + END, "d" + END]),
        (ALTERNATING, ["b" + END, "d" + END]),
        (TAGGED_WITHOUT_END, ["b" + END, "d" + END]),
        (NO_PROMPT, ["assistant: b" + END, "assistant: d" + END]),
        (REWRITING, ["b" + END, "<think></think>d" + END]),
    ],
    ids=["plain", "trimming", "alternating", "tagged", "no-prompt", "rewriting"],
)
def test_answers_are_found_whatever_the_template(
    source: str, spans: list[str], byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    assert trained(template(source, byte_tokenizer), FOUR) == spans


@pytest.mark.parametrize("name", TEMPLATES)
def test_tagged_templates_give_what_prefix_rendering_gives(
    name: str, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The tags of our templates are checked against the method that needs no tags."""
    tagged = build_chat_template(byte_tokenizer, name)
    tagged = ChatTemplate(
        tagged.source, {**tagged.variables, "bos_token": "<s>"}, tagged.end_markers
    )
    bare_source = tagged.source
    for word in ("generation", "endgeneration"):
        bare_source = bare_source.replace("{%- " + word + " %}", "")
    bare = ChatTemplate(bare_source, tagged.variables, tagged.end_markers)
    assert tagged.tracks_answers
    assert not bare.tracks_answers
    talks = [
        FOUR,
        chat(("system", "s"), ("user", " a "), ("assistant", "b\nc")),
        chat(("user", "a"), ("assistant", "a")),
        chat(("user", "x assistant"), ("assistant", "assistant"), ("user", "x")),
    ]
    for talk in talks:
        expected = mark_chat(bare, talk, ASSISTANT)
        assert mark_chat(tagged, talk, ASSISTANT) == expected
        assert len(expected.spans) == sum(turn.role == "assistant" for turn in talk.turns)


def test_answer_that_repeats_the_question(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    source = template(PLAIN, byte_tokenizer)
    marked = mark_chat(source, chat(("user", "same"), ("assistant", "same")), ASSISTANT)
    assert marked.spans == ((marked.text.rindex("same"), marked.text.rindex(END) + len(END)),)


def test_content_that_looks_like_markup(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    source = template(PLAIN, byte_tokenizer)
    tricky = f"x{END}\n<|im_start|>assistant\ny"
    assert trained(source, chat(("user", tricky), ("assistant", tricky), ("user", "z"))) == [
        tricky + END
    ]


@pytest.mark.parametrize("source", [PLAIN, TAGGED_WITHOUT_END, REWRITING])
@pytest.mark.parametrize(
    ("rule", "index", "ends"),
    [("turn", 1, 2), ("all", 0, 4), ("last", 1, 1), ("none", 1, 0)],
)
def test_end_token_rules(
    source: str, rule: Any, index: int, ends: int, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    spans = trained(
        template(source, byte_tokenizer), FOUR, TrainRules(frozenset({"assistant"}), rule)
    )
    assert "".join(spans).count(END) == ends
    assert [letter for letter in "abcd" if letter in "".join(spans).replace("think", "")] == [
        "b",
        "d",
    ]
    assert index in (0, 1)


def test_user_turns_can_be_trained(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    rules = TrainRules(frozenset({"user"}))
    assert trained(template(PLAIN, byte_tokenizer), FOUR, rules) == ["a" + END, "c" + END]


def test_refusal_by_the_template(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    talk = chat(("user", "a"), ("user", "b"), ("assistant", "c"))
    with pytest.raises(MaskError, match="refuses the row: roles must alternate"):
        trained(template(ALTERNATING, byte_tokenizer), talk)


def test_a_template_that_rewrites_content_is_still_followed_by_prefixes(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert trained(template(SHOUTING, byte_tokenizer), FOUR) == ["B" + END, "D" + END]


def test_what_cannot_be_found_is_refused(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    """No prefix fits and the content is not in the text: neither way leads to the answer."""
    body = NO_PROMPT.replace("{{ m.content }}", "{{ m.content | length }}")
    source = template("{{ messages | length }}" + body, byte_tokenizer)
    with pytest.raises(MaskError, match=r"turn 2 \(assistant\) cannot be found"):
        trained(source, FOUR)


def test_an_answer_that_carries_its_own_thinking(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    thought = "<think>\nhm\n</think>\n\nyes"
    talk = chat(("user", "a"), ("assistant", thought), ("user", "b"), ("assistant", thought))
    source = build_chat_template(byte_tokenizer, "qwen")
    assert trained(source, talk) == ["yes" + END, thought + END]


def test_end_markers_are_learnt_from_the_template(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    assert template(PLAIN, byte_tokenizer).end_markers == (END,)
    words = PLAIN.replace(END, " [stop]")
    assert template(words, byte_tokenizer).end_markers == ("[stop]",)


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALL_TEMPLATES = {
    "content may be empty": "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}",
    "content must be null": ("{% if m.content is none %}{{ m.tool_calls | tojson }}{% endif %}"),
    "arguments must be text": (
        "{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name + "
        "c.function.arguments }}{% endfor %}{% endif %}"
    ),
    "calls are not read": "",
}


@pytest.mark.parametrize("name", CALL_TEMPLATES)
def test_tool_calls_are_never_lost(name: str, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    body = CALL_TEMPLATES[name] + "{{ m.content if m.content else '' }}"
    source = template(PLAIN.replace("{{ m.content }}", body), byte_tokenizer)
    talk = Chat(
        (
            Turn("user", "a"),
            Turn("assistant", "", extra={"tool_calls": [CALL]}),
            Turn("assistant", "z"),
        )
    )
    first, second = trained(source, talk)
    assert "f" in first
    assert '"x": 1' in first
    assert second == "z" + END


@pytest.mark.parametrize(
    ("source", "where"),
    [(PLAIN, "system"), ("{{ tools | tojson if tools }}" + PLAIN, "template")],
)
def test_tools_are_never_lost(
    source: str, where: str, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    tools: Sequence[Any] = ({"type": "function", "function": {"name": "area", "parameters": {}}},)
    found = template(source, byte_tokenizer)
    talk = Chat((Turn("user", "a"), Turn("assistant", "b")), tools)
    adapted = found.adapt(talk)
    marked = mark_chat(found, adapted, ASSISTANT)
    assert '"name": "area"' in marked.text
    assert (adapted.turns[0].role == "system") == (where == "system")
    assert [marked.text[a:b] for a, b in marked.spans] == ["b" + END]


def test_unknown_template_names_the_known_ones(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RecipeError, match=r"'chatlm' is unknown\. Use tokenizer_default, chatml"):
        build_chat_template(byte_tokenizer, "chatlm")


def test_fallback_name(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    name = "tokenizer_default_fallback_llama3"
    assert build_chat_template(byte_tokenizer, name).source == byte_tokenizer.chat_template


def test_template_from_a_file(byte_tokenizer: PreTrainedTokenizerBase, tmp_path: Any) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(PLAIN)
    assert build_chat_template(byte_tokenizer, "jinja", str(file)).source == PLAIN
    with pytest.raises(RecipeError, match=r"template file '.*/no.jinja' does not exist"):
        build_chat_template(byte_tokenizer, "jinja", str(tmp_path / "no.jinja"))


ENDS_TRIMMED = PLAIN.replace("m.content", "m.content.rstrip()")


@pytest.mark.parametrize(
    ("source", "parts", "expected"),
    [
        (PLAIN, ((" think ", False), ("ans", True)), ["ans" + END]),
        (TRIMMING, ((" think ", False), ("ans", True)), ["ans" + END]),
        (ENDS_TRIMMED, ((" think ", False), ("ans", True)), ["ans" + END]),
        (PLAIN, ((" think", True), (" ans ", False)), [" think", END]),
        (TRIMMING, ((" think", True), (" ans ", False)), ["think", END]),
        (ENDS_TRIMMED, ((" think", True), (" ans ", False)), [" think", END]),
        (PLAIN, ((" think", False), (" ans ", True)), [" ans " + END]),
        (TRIMMING, ((" think", False), (" ans ", True)), [" ans" + END]),
        (ENDS_TRIMMED, ((" think", False), (" ans ", True)), [" ans" + END]),
    ],
)
def test_parts_are_found_with_space_around_them(
    source: str, parts: Any, expected: list[str], byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    segments = tuple(Segment(text, trained=wish) for text, wish in parts)
    content = "".join(text for text, _ in parts)
    talk = Chat((Turn("user", "q"), Turn("assistant", content, parts=segments)))
    assert trained(template(source, byte_tokenizer), talk) == expected
