"""Prepared rows are found by content, built once, and whole or not there at all."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ndtrain.data.cache import build_once, content_key
from ndtrain.data.prepare import Prepared, prepare, prepared_dir
from ndtrain.errors import CheckpointError, DataError, ExitCode
from ndtrain.model.byte_tokenizer import build_byte_tokenizer
from ndtrain.recipe.schema import Recipe

PrepareRows = Callable[..., Prepared]


def test_the_second_time_nothing_is_built(prepare_rows: PrepareRows) -> None:
    first = prepare_rows([{"text": "ab"}], "completion")
    again = prepare_rows([{"text": "ab"}], "completion")
    assert (first.report.cached, again.report.cached) == (False, True)
    assert first.path == again.path


def test_an_edited_file_never_trains_stale(prepare_rows: PrepareRows, tmp_path: Path) -> None:
    """Same path, same size, same time of change: only the content tells."""
    first = prepare_rows([{"text": "ab"}], "completion")
    before = (tmp_path / "rows.jsonl").stat()
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "cd"}) + "\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    second = prepare_rows([{"text": "cd"}], "completion")
    assert not second.report.cached
    assert first.train.row(0)[0].tolist() == [97, 98, 258]
    assert second.train.row(0)[0].tolist() == [99, 100, 258]


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_len": 99},
        {"train_on_inputs": True},
        {"excess_length_strategy": "truncate"},
        {"min_sample_len": 3},
        {"val_set_size": 1},
        {"seed": 7},
        {"preprocessing_seed": 7},
        {"dataset_exact_deduplication": True},
        {"default_system_message": "s"},
        {"chat_template": "llama3"},
        {"chat_template": "jinja", "chat_template_jinja": "{{ messages[1].content }}!"},
        {"chat_template_kwargs": {"x": 1}},
        {"entry": {"roles_to_train": ["user"]}},
        {"entry": {"train_on_eos": "none"}},
        {"entry": {"roles": {"assistant": ["user"], "user": ["assistant"]}}},
        {"entry": {"weight": 2.0}},
        {"entry": {"samples": 3}},
        {"entry": {"on_bad_row": "skip"}},
    ],
    ids=str,
)
def test_every_option_that_changes_the_rows_has_a_cache_of_its_own(
    change: dict[str, Any], prepare_rows: PrepareRows
) -> None:
    rows = [CHAT, {**CHAT, "n": 1}]
    plain = prepare_rows(rows, "chat_template")
    assert prepare_rows(rows, "chat_template", **change).path != plain.path


@pytest.mark.parametrize(
    "change", [{"learning_rate": 1.0}, {"num_epochs": 3}, {"micro_batch_size": 4}]
)
def test_options_that_do_not_touch_the_rows_share_one(
    change: dict[str, Any], prepare_rows: PrepareRows
) -> None:
    plain = prepare_rows([CHAT], "chat_template")
    assert prepare_rows([CHAT], "chat_template", **change).report.cached
    assert plain.report.sources[0].rows_used == 1


def test_another_tokenizer_has_a_cache_of_its_own(
    write_jsonl: Any, byte_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write_jsonl({"text": "ab"})
    recipe = Recipe.model_validate(
        {"learning_rate": 1, "datasets": [{"path": str(path), "type": "completion"}]}
    )
    one, other = (prepare(recipe, byte_tokenizer, key, tmp_path / "c") for key in ("a", "b"))
    assert one.path != other.path


ROLES = ["assistant", "user", *(f"role-{number}" for number in range(14))]
"""So many that two processes do not have them in the same order by chance."""


def prepared_name(folder: Path) -> str:
    """What the rows of many roles are kept under."""
    rows = {"path": "synthetic", "length": 2, "type": "_synthetic", "roles_to_train": ROLES}
    recipe = Recipe.model_validate({"learning_rate": 1, "datasets": [rows]})
    return prepare(recipe, build_byte_tokenizer(), "k", folder).path.name


def test_the_key_does_not_depend_on_the_order_of_sets(tmp_path: Path) -> None:
    """Prepared by one process and looked up by another, whose hashes of text differ."""
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_cache import ROLES, Path, prepared_name\n"
        f"print(list(set(ROLES)), prepared_name(Path({str(tmp_path / 'other')!r})), sep='\\n')"
    )
    order, name = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "random"},
        timeout=120,
    ).stdout.splitlines()
    assert order != str(list(set(ROLES)))
    assert name == prepared_name(tmp_path / "own")


def _count_build(folder: Path, log: Path, barrier: Any) -> None:
    def build(path: Path) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        (path / "done").touch()

    barrier.wait()
    build_once(folder, build)
    assert (folder / "done").exists()


def test_concurrent_processes_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    folder, log = tmp_path / "cache" / "key", tmp_path / "log"
    workers = [context.Process(target=_count_build, args=(folder, log, barrier)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0, 0]
    assert len(log.read_text().splitlines()) == 1


def _build_for_ever(folder: Path, started: Any) -> None:
    def build(path: Path) -> None:
        (path / "half").write_text("half")
        started.set()
        time.sleep(60)

    build_once(folder, build)


def test_a_killed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    folder = tmp_path / "key"
    worker = context.Process(target=_build_for_ever, args=(folder, started))
    worker.start()
    assert started.wait(20)
    os.kill(worker.pid or 0, signal.SIGKILL)
    worker.join(20)
    assert not folder.exists()

    assert build_once(folder, lambda path: (path / "whole").touch()) is False
    assert [item.name for item in folder.iterdir()] == ["whole"]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["key", "key.lock"]


def test_a_failed_build_leaves_nothing_behind(prepare_rows: PrepareRows, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        prepare_rows([{"text": "ab"}, {"txt": "ab"}], "completion")
    assert [item.suffix for item in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="set dataset_prepared_path") as caught:
        build_once(tmp_path / "file" / "key", lambda path: None)
    assert caught.value.exit_code is ExitCode.CHECKPOINT


def test_the_recipe_may_name_the_folder(tmp_path: Path) -> None:
    named = Recipe.model_validate({"learning_rate": 1, "dataset_prepared_path": str(tmp_path)})
    assert prepared_dir(named) == tmp_path
    assert prepared_dir(Recipe.model_validate({"learning_rate": 1})).name == "prepared"


def test_the_format_version_is_part_of_the_key() -> None:
    assert content_key({"a": 1}) == content_key({"a": 1})
    assert content_key({"a": 1}) != content_key({"a": 2})


def test_rows_found_ready_are_named_by_the_file_that_is_here(
    tmp_path: Path,
    prepare_file: Callable[..., Prepared],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ['{"instruction": "Say", "output": "Yes"}', '{"instruction": "No"}']
    for name in ("there", "here"):
        home = tmp_path / name
        home.mkdir()
        (home / "rows.jsonl").write_text("\n".join(lines) + "\n")
        monkeypatch.setenv("HOME", str(home))
        prepared = prepare_file("~/rows.jsonl", entry={"on_bad_row": "skip"})
        assert prepared.report.cached == (name == "here")
        assert prepared.train.place(0) == f"{home}/rows.jsonl:1"
        (example,) = prepared.report.sources[0].examples.values()
        assert example.startswith(f"{home}/rows.jsonl:2: ")
