"""Files named by an option: written, or one message that says which option to change."""

import errno
from pathlib import Path

import pytest

from ndtrain.errors import RecipeError
from ndtrain.recipe.output import write_named


def test_folders_above_are_made_and_text_is_utf8(tmp_path: Path) -> None:
    path = tmp_path / "ä b" / "c" / "job.sh"
    write_named(path, "ö\n", option="with --write")
    assert path.read_bytes() == "ö\n".encode()


def test_an_older_file_is_replaced_unless_it_is_to_be_kept(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    path.write_text("old")
    with pytest.raises(RecipeError) as raised:
        write_named(path, "new", option="with --plot", hint_to_replace="Name another one.")
    assert str(raised.value) == f"{path}: this file exists already. Name another one."
    assert path.read_text() == "old"
    write_named(path, "new", option="with --plot")
    assert path.read_text() == "new"


@pytest.mark.parametrize("keep", ["", "Name another one."])
def test_a_folder_is_no_file(tmp_path: Path, keep: str) -> None:
    with pytest.raises(RecipeError) as raised:
        write_named(tmp_path, "text", option="with --plot", hint_to_replace=keep)
    assert str(raised.value) == f"{tmp_path}: is a folder. Name another file with --plot."


def test_a_place_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "plot.svg"
    with pytest.raises(RecipeError) as raised:
        write_named(path, "text", option="with --plot")
    assert str(raised.value).startswith(f"{path}: cannot be written: ")
    assert raised.value.hint == "Name another file with --plot."


def test_a_full_disk_keeps_its_own_exit_code(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(OSError, match="No space left") as raised:
        write_named(full, "text", option="with --plot")
    assert raised.value.errno == errno.ENOSPC
