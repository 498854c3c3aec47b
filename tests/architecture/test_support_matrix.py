"""The support matrix says what a test report says, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path
from xml.sax.saxutils import quoteattr

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "scripts" / "support_matrix.py"


def cell(architecture: str, mesh: tuple[int, ...], **keys: object) -> str:
    values = {"packed": True, "adapter": "none", "cp_method": "auto", **keys}
    found = {"architecture": architecture, "mesh": mesh, **values}
    return f'<property name="mesh-cell" value={quoteattr(json.dumps(found))} />'


def lines(folder: Path, *cells: str) -> list[str]:
    report = folder / "report.xml"
    report.write_text(
        '<testsuites><testsuite timestamp="2026-01-02T03:04:05"><testcase><properties>'
        f"{''.join(cells)}</properties></testcase></testsuite></testsuites>"
    )
    page = folder / "page.md"
    subprocess.run([sys.executable, str(SCRIPT), str(report), str(page)], check=True, timeout=60)
    return page.read_text().splitlines()


def row(found: list[str], start: str) -> list[str]:
    (line,) = [line for line in found if line.startswith(f"| {start} |")]
    return [part.strip() for part in line.strip("|").split("|")][1:]


def test_only_cells_that_passed_are_marked(tmp_path: Path) -> None:
    found = lines(
        tmp_path,
        cell("llama", (2, 1, 1, 2)),
        cell("qwen3", (2, 1, 1, 2)),
        cell("llama", (2, 1, 1, 2), adapter="dora"),
        cell("llama", (2, 1, 1, 2), adapter="qlora", packed=False),
        cell("gemma2", (1, 2, 2, 1)),
        cell("llama", (1, 1, 4, 1), packed=False),
    )
    assert row(found, "2, 1, 1, 2") == [
        "4",
        "–",
        "all",
        "–",
        "–",
        "llama",
        "llama",
        "refused",
        "refused",
    ]
    assert row(found, "1, 1, 4, 1")[:3] == ["4", "llama", "–"]
    assert row(found, "2, 2, 2, 2")[:7] == ["16", *["–"] * 6]
    assert row(found, "`gemma2`") == ["–", "–", "same", "–"]
    assert any("proved 6 cells on 2026-01-02" in line for line in found)
