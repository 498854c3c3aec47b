"""What an installation brings along."""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MAX_CORE_DISTRIBUTIONS = 60


def closure(name: str) -> set[str]:
    """Everything that installing `name`, without extras, installs."""
    seen: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(name), "")]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for line in requires(current[0]) or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": current[1]}):
                target = canonicalize_name(need.name)
                waiting += [(target, extra) for extra in ("", *need.extras)]
    return {name for name, _ in seen}


def test_a_core_install_is_small() -> None:
    needed = closure("ndtrain")
    assert {"torch", "transformers", "tokenizers", "numpy"} <= needed
    assert len(needed) <= MAX_CORE_DISTRIBUTIONS


def test_every_core_and_development_distribution_is_pinned(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    pins = {
        canonicalize_name(line.partition("==")[0])
        for line in (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if re.match(r"^[A-Za-z0-9._-]+==[^+]+$", line)
    }
    assert {canonicalize_name(Requirement(line).name) for line in wanted} <= pins
    assert closure("ndtrain") - {"ndtrain"} <= pins
