"""A trained model carries the chat template it was trained on, whoever chose it."""

from typing import Any

import pytest

from ndtrain.data.template_search import build_chat_template
from ndtrain.model.byte_tokenizer import CHAT_TEMPLATE, build_byte_tokenizer
from ndtrain.recipe.schema import Recipe
from ndtrain.train.stored_run import set_chat_template

OWN = "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"


def served(datasets: list[dict[str, Any]], **keys: Any) -> str | None:
    """The template of the tokenizer that is exported."""
    rows = [{"path": f"{number}.jsonl", **one} for number, one in enumerate(datasets)]
    recipe = Recipe.model_validate(
        {"base_model": "m", "datasets": rows, "learning_rate": 1e-4, **keys}
    )
    tokenizer = build_byte_tokenizer()
    set_chat_template(tokenizer, recipe)
    return tokenizer.chat_template


def family(name: str) -> str:
    return build_chat_template(build_byte_tokenizer(), name).source


CHAT = {"type": "chat_template"}


@pytest.mark.parametrize(
    ("datasets", "keys", "wanted"),
    [
        ([CHAT], {}, CHAT_TEMPLATE),
        ([CHAT], {"chat_template": "chatml"}, family("chatml")),
        ([{**CHAT, "chat_template": "llama3"}], {}, family("llama3")),
        ([{**CHAT, "chat_template": "llama3"}] * 2, {"chat_template": "gemma"}, family("llama3")),
        ([{**CHAT, "chat_template_jinja": OWN}], {}, OWN),
        # text has no turns and no say
        ([{**CHAT, "chat_template": "llama3"}, {"type": "completion"}], {}, family("llama3")),
        # where datasets disagree, the recipe decides
        ([{**CHAT, "chat_template": "llama3"}, CHAT], {"chat_template": "qwen"}, family("qwen")),
        ([{**CHAT, "chat_template": "llama3"}, CHAT], {}, CHAT_TEMPLATE),
    ],
)
def test_it_is_the_one_on_which_the_datasets_agree(
    datasets: list[dict[str, Any]], keys: dict[str, Any], wanted: str
) -> None:
    assert served(datasets, **keys) == wanted
