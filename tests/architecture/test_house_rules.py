"""The rules of the house that a program can check: see CONTRIBUTING.md."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PROGRAMS = [
    *SOURCES,
    *sorted(path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")),
]
MAX_LINES = 400
GRAB_BAGS = {"utils", "util", "helpers", "helper", "common", "misc"}
REPLACEABLE = {"sys.stdout", "sys.stderr"}
"""Streams are variables by design: a rank's output goes to its log."""
ENVIRONMENT = ROOT / "src" / "ndtrain" / "environment.py"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(tree: ast.Module) -> set[str]:
    """Names that are bound to whole modules: `import torch`, `import torch.distributed as dist`."""
    return {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }


def root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def violations(tree: ast.Module, *, reads_environment: bool) -> Iterator[str]:
    modules = imported_modules(tree)
    for node in ast.walk(tree):
        for found in (
            "`global` statement" if isinstance(node, ast.Global) else None,
            None if reads_environment else environment_access(node),
            swallowed_exception(node),
            patched_module(node, modules),
        ):
            if found:
                yield f"{getattr(node, 'lineno', 0)}: {found}"


def environment_access(node: ast.AST) -> str | None:
    names = {"environ", "getenv", "putenv"}
    if isinstance(node, ast.Attribute) and root_name(node) == "os" and node.attr in names:
        return f"os.{node.attr} outside environment.py"
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        imported = {alias.name for alias in node.names} & names
        return f"{imported} outside environment.py" if imported else None
    return None


def swallowed_exception(node: ast.AST) -> str | None:
    if not isinstance(node, ast.ExceptHandler):
        return None
    too_wide = node.type is None or root_name(node.type) in ("Exception", "BaseException")
    nothing_done = all(isinstance(part, ast.Pass) for part in node.body)
    return "swallowed exception" if too_wide and nothing_done else None


def patched_module(node: ast.AST, modules: set[str]) -> str | None:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = [target for target in node.targets if isinstance(target, ast.Attribute)]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign) and isinstance(node.target, ast.Attribute):
        targets = [node.target]
    elif isinstance(node, ast.Call) and root_name(node.func) == "setattr":
        targets = node.args[:1]
    targets = [target for target in targets if ast.unparse(target) not in REPLACEABLE]
    patched = {root_name(target) for target in targets} & modules
    return f"{patched} patched from outside" if patched else None


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_source_files_keep_the_rules(path: Path) -> None:
    assert list(violations(tree_of(path), reads_environment=path == ENVIRONMENT)) == []


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    global x\n    x = 1\n",
        "import os\nprint(os.environ['A'])\n",
        "import os\nprint(os.getenv('A'))\n",
        "from os import environ\n",
        "try:\n    f()\nexcept Exception:\n    pass\n",
        "try:\n    f()\nexcept:\n    pass\n",
        "import torch\ntorch.nn.Linear.forward = None\n",
        "import torch.distributed as dist\nsetattr(dist, 'x', 1)\n",
    ],
)
def test_the_checker_finds_what_it_looks_for(text: str) -> None:
    assert list(violations(ast.parse(text), reads_environment=False))


@pytest.mark.parametrize("path", PROGRAMS, ids=name_of)
def test_no_file_is_longer_than_the_limit(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", PROGRAMS, ids=name_of)
def test_no_file_is_a_grab_bag(path: Path) -> None:
    assert path.stem not in GRAB_BAGS


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports test files by their base name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_imports_point_downwards() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout
