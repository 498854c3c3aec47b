"""docs/choosing-a-mesh.md says what the planner says today."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_tables_and_pictures_of_the_page_are_up_to_date():
    script = ROOT / "docs" / "scripts" / "choosing_a_mesh.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
