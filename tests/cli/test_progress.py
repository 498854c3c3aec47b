"""What somebody at a terminal sees while rows are prepared."""

import os
import pty
import subprocess
import sys
from pathlib import Path

KEYS = ("max_steps=1", "device=cpu", "export=false", "sequence_len=512")


def on_a_terminal(folder: Path, *words: str) -> str:
    """The output of a command whose standard output is a terminal."""
    master, slave = pty.openpty()
    with os.fdopen(master, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            [sys.executable, "-m", "ndtrain", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "OMP_NUM_THREADS": "1"},
        )
        os.close(slave)
        seen = b""
        try:
            while piece := screen.read(65536):
                seen += piece
        except OSError:
            pass  # how Linux says that nobody writes any more
        assert process.wait(120) == 0, seen.decode()
    return seen.decode()


def test_train_shows_the_rows_it_prepares_once(recipe: Path) -> None:
    sets = [word for key in KEYS for word in ("--set", key)]
    cache = ("--set", f"dataset_prepared_path={recipe.parent / 'prepared'}")
    first = on_a_terminal(recipe.parent, "train", recipe.name, *sets, *cache)
    assert "Tokenising rows.jsonl" in first
    assert "4 rows" in first
    again = on_a_terminal(recipe.parent, "train", recipe.name, "--restart", *sets, *cache)
    assert "Tokenising" not in again
