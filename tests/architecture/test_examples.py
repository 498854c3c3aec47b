"""Every bundled recipe: a title, the editor schema, a comment for each key, and it loads."""

import json
from pathlib import Path

import pytest

from ndtrain.recipe.catalog import SCHEMA_FILE, examples_folder, list_examples
from ndtrain.recipe.json_schema import recipe_schema
from ndtrain.recipe.load import load_recipe
from ndtrain.recipe.reference import GROUPS, render_reference
from ndtrain.recipe.schema import Recipe

EXAMPLES = [example.path for example in list_examples()]
KEYS_PER_COMMENT = 3


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_loads_without_a_notice(path: Path) -> None:
    assert load_recipe(path).notices == ()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_title_and_schema_line_come_first(path: Path) -> None:
    title, schema = path.read_text(encoding="utf-8").splitlines()[:2]
    assert title.startswith("# ")
    assert len(title) <= 100
    assert schema == f"# yaml-language-server: $schema={SCHEMA_FILE}"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_key_is_explained(path: Path) -> None:
    unexplained, left = [], 0
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ---") or not line.strip():
            left = 0
        elif line.startswith("#"):
            left = KEYS_PER_COMMENT
        elif not line.startswith((" ", "-")):
            if left == 0 and " # " not in line:
                unexplained.append(line)
            left = max(0, left - 1)
    assert unexplained == []


def test_the_committed_schema_is_fresh() -> None:
    committed = json.loads((examples_folder() / SCHEMA_FILE).read_text(encoding="utf-8"))
    assert committed == recipe_schema(), "run `make schema`"


def test_the_committed_reference_page_is_fresh(root: Path) -> None:
    page = (root / "docs" / "reference" / "recipe.md").read_text(encoding="utf-8")
    assert page == render_reference(), "run `make schema`"


def test_the_reference_names_every_key() -> None:
    named = {key for group in GROUPS.values() for key in group.fields_by_key()}
    assert set(Recipe.fields_by_key()) <= named


def test_the_quickstart_asks_held_out_questions() -> None:
    data = examples_folder() / "data"
    lines = (data / "parallelism-faq-heldout.jsonl").read_text(encoding="utf-8").splitlines()
    held_out = {json.loads(line)["messages"][0]["content"] for line in lines}
    questions = (data / "quickstart-questions.txt").read_text(encoding="utf-8").splitlines()
    assert len(questions) == 3
    assert set(questions) <= held_out
