"""What README and docs show is true: recipes load, commands, targets and links exist."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from ndtrain.cli import app
from ndtrain.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


def commands() -> list[list[str]]:
    """Every command line of the pages, split into words, comments left out."""
    lines = [
        part.strip()
        for page in PAGES
        for block in blocks(page, "bash")
        for line in block.splitlines()
        for part in line.split("#")[0].split("&&")
    ]
    return [shlex.split(line) for line in lines if line]


@pytest.mark.parametrize(
    "words", [words for words in commands() if words[0] == "ndtrain"], ids=" ".join
)
def test_commands_and_their_options_exist(words: list[str]) -> None:
    command, rest = get_command(app), words[1:]
    while hasattr(command, "commands") and rest:
        assert rest[0] in command.commands
        command, rest = command.commands[rest[0]], rest[1:]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in rest if word.startswith("--")} <= known


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = {word for words in commands() if words[0] == "make" for word in words[1:]}
    assert {"install", "check", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_recipe_loads(tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "README.md", "yaml")
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert load_recipe(path).notices == ()


def test_continuous_integration_runs_the_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    assert script[-1] == "make test"
    assert "make install" in script
