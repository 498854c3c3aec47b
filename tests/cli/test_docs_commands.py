"""Command blocks below `<!-- run -->` in the README and the docs are run, page by page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = re.compile(r"^<!-- run -->\n```bash\n(?P<script>.*?)^```", re.M | re.S)
PAGES = {
    str(page.relative_to(ROOT)): scripts
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if (scripts := [found["script"] for found in RUN.finditer(page.read_text("utf-8"))])
}


def test_some_pages_have_commands_to_run() -> None:
    assert {"docs/index.md", "docs/tutorial.md", "docs/how-to/job-files.md"} <= set(PAGES)


@pytest.mark.parametrize("page", list(PAGES))
def test_its_commands_run_in_order(page: str, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ndtrain").write_text(f'#!/bin/bash\nexec {sys.executable} -m ndtrain "$@"\n')
    (programs / "ndtrain").chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    for script in PAGES[page]:
        done = subprocess.run(
            ["bash", "-eu", "-c", script],
            cwd=work,
            env={
                **os.environ,
                "PATH": f"{programs}:{os.environ['PATH']}",
                "NO_COLOR": "1",
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
