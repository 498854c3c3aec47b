"""Which template a dataset is rendered by, and what is said of one that cannot render."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ndtrain.data.prepare import Prepared, prepare
from ndtrain.errors import RecipeError
from ndtrain.recipe.load import load_recipe

PrepareRows = Callable[..., Prepared]
ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
JINJA = "{% for m in messages %}" + "NAME {{ m.content }}<|im_end|>{% endfor %}"
OF_RECIPE, OF_DATASET = JINJA.replace("NAME", "recipe"), JINJA.replace("NAME", "dataset")


def text(prepared: Prepared) -> str:
    """What was rendered, up to the first content."""
    ids = prepared.train.row(0)[0].tolist()
    return bytes(token for token in ids if token < 256).decode().partition(" ")[0]


@pytest.mark.parametrize(
    ("recipe", "entry", "begins"),
    [
        ({"chat_template_jinja": OF_RECIPE}, {}, "recipe"),
        ({"chat_template": "jinja", "chat_template_jinja": OF_RECIPE}, {}, "recipe"),
        ({"chat_template": "llama3"}, {"chat_template_jinja": OF_DATASET}, "dataset"),
        (
            {"chat_template": "jinja", "chat_template_jinja": OF_RECIPE},
            {"chat_template": "jinja", "chat_template_jinja": OF_DATASET},
            "dataset",
        ),
        (
            {"chat_template": "jinja", "chat_template_jinja": OF_RECIPE},
            {"chat_template_jinja": OF_DATASET},
            "dataset",
        ),
        (
            {"chat_template": "jinja", "chat_template_jinja": OF_RECIPE},
            {"chat_template": "tokenizer_default"},
            "user\na\nassistant\nb\n",
        ),
        (
            {"chat_template": "jinja", "chat_template_jinja": OF_RECIPE},
            {"chat_template": "chatml"},
            "user\na\nassistant\nb\n",
        ),
    ],
)
def test_name_and_jinja_come_from_one_level(
    recipe: dict[str, str], entry: dict[str, str], begins: str, prepare_rows: PrepareRows
) -> None:
    assert text(prepare_rows([ROW], "chat_template", entry=entry, **recipe)) == begins


def test_a_template_may_lie_in_the_home_folder_or_a_package(
    prepare_rows: PrepareRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.jinja").write_text(OF_RECIPE)
    for address in ("~/own.jinja", str(tmp_path / "own.jinja")):
        assert text(prepare_rows([ROW], "chat_template", chat_template_jinja=address)) == "recipe"
    package = tmp_path / "made_up_templates"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "own.jinja").write_text(OF_DATASET)
    monkeypatch.syspath_prepend(str(tmp_path))
    address = "package://made_up_templates/own.jinja"
    assert text(prepare_rows([ROW], "chat_template", chat_template_jinja=address)) == "dataset"


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ("datasets:\n  - path: PATH\nchat_template_jinja: '{% for m in messages %}'\n", 5),
        ("datasets:\n  - path: PATH\n    chat_template_jinja: '{% for m in messages %}'\n", 5),
        (
            "chat_template: jinja\nchat_template_jinja: '{{ m | nosuch }}'\ndatasets:\n"
            "  - {path: PATH, on_bad_row: skip}\n",
            4,
        ),
    ],
)
def test_a_template_that_is_no_jinja_is_a_mistake_of_the_recipe(
    lines: str,
    line: int,
    write_jsonl: Any,
    tmp_path: Path,
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    rows = write_jsonl(ROW)
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model_config: {{}}\nlearning_rate: 1\n{lines.replace('PATH', str(rows))}")
    with pytest.raises(RecipeError, match="the chat template is not valid Jinja: ") as caught:
        prepare(load_recipe(path, check=False), byte_tokenizer, "b", tmp_path / "cache")
    assert caught.value.where.startswith(f"{path}:{line}:")
    assert "(line 1 of the template)" in caught.value.message
