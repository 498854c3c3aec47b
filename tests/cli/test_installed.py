"""The layout of an installed package: examples inside it, no checkout around it."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip fills it from the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"examples": "ndtrain/examples"}
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(
        ROOT / "src" / "ndtrain",
        folder / "ndtrain",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copytree(ROOT / "examples", folder / "ndtrain" / "examples")
    return folder


def run(site: Path, cwd: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "ndtrain", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_recipes_come_from_the_package(site: Path, tmp_path: Path) -> None:
    copied = run(site, tmp_path, "recipes", "copy", "quickstart")
    assert (copied.returncode, copied.stderr) == (0, "")
    schema = (tmp_path / "quickstart.yaml").read_text().splitlines()[1].partition("$schema=")[2]
    assert Path(schema) == site / "ndtrain" / "examples" / "recipe.schema.json"


def test_bundled_rows_are_found_in_the_package(site: Path, tmp_path: Path) -> None:
    code = (
        "from ndtrain.recipe.addresses import resolve_address as find\n"
        "print(find('package://ndtrain/examples/data/parallelism-faq.jsonl'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    found = Path(done.stdout.strip())
    assert found == site / "ndtrain" / "examples" / "data" / "parallelism-faq.jsonl"
    assert found.is_file()
