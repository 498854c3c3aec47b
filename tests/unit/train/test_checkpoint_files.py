"""Folders, markers, choice and rotation of checkpoints."""

import errno
import json
import os
from pathlib import Path

import pytest

from ndtrain.errors import CheckpointError
from ndtrain.train import checkpoint_files as files


def make(folder: Path, step: int, run_id: str = "run", **meta: object) -> Path:
    """A whole checkpoint with two tensor files."""
    unfinished = files.unfinished_path(folder, step)
    unfinished.mkdir(parents=True)
    (unfinished / "__0_0.distcp").write_bytes(b"tensors" * 10)
    (unfinished / ".metadata").write_bytes(b"index")
    final = files.final_path(folder, step)
    files.seal(unfinished, {"run_id": run_id, "step": step, **meta}, replaces=final)
    return final


def test_the_sealed_folder_is_whole_and_alone(tmp_path: Path) -> None:
    path = make(tmp_path, 200)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000200"]
    assert sorted(entry.name for entry in path.iterdir()) == [
        ".metadata",
        "COMPLETE",
        "__0_0.distcp",
        "meta.json",
    ]
    found = files.newest_checkpoint(tmp_path)
    assert found is not None
    assert (found.path, found.step, found.meta["run_id"]) == (path, 200, "run")


def test_no_folder_means_no_checkpoint(tmp_path: Path) -> None:
    assert files.newest_checkpoint(tmp_path / "absent") is None


def test_newest_goes_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 9):
        make(tmp_path, step)
    found = files.newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1_000_000


@pytest.mark.parametrize("name", ["COMPLETE", "meta.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_damage_at_any_file_is_passed_over_with_its_reason(
    tmp_path: Path, name: str, damage: str
) -> None:
    older = make(tmp_path, 100)
    path = make(tmp_path, 200)
    file = path / name
    if damage == "missing":
        file.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
    found = files.newest_checkpoint(tmp_path)
    assert found is not None
    assert found.path == older
    assert len(found.skipped) == 1
    assert str(path) in found.skipped[0]
    assert name in found.skipped[0]


def test_all_damaged_is_reported_not_hidden(tmp_path: Path) -> None:
    (make(tmp_path, 100) / "COMPLETE").unlink()
    assert files.newest_checkpoint(tmp_path) is None
    assert files.passed_over(tmp_path) == (f"{tmp_path}/step-000100: it has no COMPLETE marker.",)


def test_a_newer_format_is_not_guessed_at(tmp_path: Path) -> None:
    path = make(tmp_path, 100)
    marker = json.loads((path / "COMPLETE").read_text())
    (path / "COMPLETE").write_text(json.dumps(marker | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99 is newer"):
        files.read_checkpoint(path)


def test_another_runs_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    make(tmp_path, 1000, run_id="old")
    mine = make(tmp_path, 200, run_id="new")
    found = files.newest_checkpoint(tmp_path, run_id="new")
    assert found is not None
    assert found.path == mine
    assert "run 'old'" in found.skipped[0]


def test_rotation_keeps_newest_best_damaged_and_foreign(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        make(tmp_path, step)
    (tmp_path / "step-000030" / "__0_0.distcp").unlink()
    make(tmp_path, 5, run_id="other")
    removed = files.rotate(tmp_path, limit=1, run_id="run", best_step=20)
    assert [path.name for path in removed] == ["step-000010", "step-000040"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000005",
        "step-000020",
        "step-000030",
        "step-000050",
    ]


def test_rotation_without_limit_keeps_all(tmp_path: Path) -> None:
    make(tmp_path, 1)
    make(tmp_path, 2)
    assert files.rotate(tmp_path, limit=None, run_id="run", best_step=None) == []


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    make(tmp_path, 7, note="first")
    make(tmp_path, 7, note="second")
    found = files.newest_checkpoint(tmp_path)
    assert found is not None
    assert found.meta["note"] == "second"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000007"]


def test_another_runs_folder_of_the_same_step_is_kept(tmp_path: Path) -> None:
    make(tmp_path, 7, run_id="old")
    make(tmp_path, 7, run_id="new")
    found = files.newest_checkpoint(tmp_path)
    assert found is not None
    assert found.meta["run_id"] == "new"
    assert (tmp_path / "step-000007.of-old" / "COMPLETE").exists()


def test_leftovers_go_and_a_moved_checkpoint_comes_back(tmp_path: Path) -> None:
    path = make(tmp_path, 7)
    path.rename(tmp_path / ".outdated-step-000007")
    files.unfinished_path(tmp_path, 8).mkdir()
    removed = files.clear_leftovers(tmp_path)
    assert [entry.name for entry in removed] == [".unfinished-step-000008"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000007"]


def test_too_little_space_is_refused_with_both_numbers(tmp_path: Path) -> None:
    files.check_space(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"needs 1,048,576\.0 TiB|needs .* MiB, but only"):
        files.check_space(tmp_path, 2**60)


def test_a_folder_that_cannot_be_listed_is_an_error_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may list anything, so the system's answer is given here.
    def refuse(self: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        files.newest_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["step-", "step-12x", "checkpoint-100", ".unfinished-step-000001"])
def test_other_names_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert files.newest_checkpoint(tmp_path) is None
