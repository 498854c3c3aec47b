"""The docs site is whole: every page is listed, every link leads somewhere, nothing is stale."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from ndtrain.cli import app
from ndtrain.recipe.json_schema import recipe_schema

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS))


def blocks(page: Path, language: str) -> list[str]:
    found = BLOCK.finditer(page.read_text("utf-8"))
    return [one["text"] for one in found if one["language"] == language]


def listed(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in listed(part)]


def test_every_page_is_listed_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    assert sorted(listed(config["nav"])) == sorted(map(name_of, PAGES))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    targets = [one["target"] for one in LINK.finditer(BLOCK.sub("", page.read_text("utf-8")))]
    local = [target for target in targets if "://" not in target and not target.startswith("#")]
    assert [one for one in local if not (page.parent / one.partition("#")[0]).exists()] == []


def commands(page: Path) -> list[list[str]]:
    lines = [
        part.strip()
        for block in blocks(page, "bash")
        for line in block.splitlines()
        for part in line.split("#")[0].split("&&")
    ]
    return [shlex.split(line) for line in lines if line.startswith("ndtrain ")]


@pytest.mark.parametrize(
    "words", [one for page in PAGES for one in commands(page)], ids=lambda words: " ".join(words)
)
def test_commands_and_their_options_exist(words: list[str]) -> None:
    command, rest = get_command(app), words[1:]
    while hasattr(command, "commands") and rest:
        assert rest[0] in command.commands
        command, rest = command.commands[rest[0]], rest[1:]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in rest if word.startswith("--")} <= known


@pytest.mark.parametrize(
    "text", [text for page in PAGES for text in blocks(page, "yaml")], ids=lambda text: text[:30]
)
def test_recipe_snippets_use_keys_that_exist(text: str) -> None:
    known = set(recipe_schema()["properties"]) | {"_"}
    parsed = yaml.safe_load(text)
    assert set(parsed) <= known


@pytest.mark.parametrize("script", ["reference_pages.py", "four_axes.py"])
def test_generated_pages_and_pictures_are_fresh(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(DOCS / "scripts" / script), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
