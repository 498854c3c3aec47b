"""Where a model may be written: a new place or an older model, never over somebody's work."""

from pathlib import Path

import pytest

from ndtrain.errors import CheckpointError, RecipeError
from ndtrain.model.model_folder import appearing_folder, check_destination


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("x")
    return folder


def test_new_and_empty_places_and_older_models_are_fine(tmp_path: Path) -> None:
    assert check_destination(tmp_path / "new" / "model") == tmp_path / "new" / "model"
    assert check_destination(fill(tmp_path / "empty")) == tmp_path / "empty"
    whole = ("config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "README.md")
    assert check_destination(fill(tmp_path / "model", *whole)) == tmp_path / "model"
    adapter = ("adapter_config.json", "adapter_model.safetensors", "loss.svg", "recipe.yaml")
    assert check_destination(fill(tmp_path / "adapter", *adapter)) == tmp_path / "adapter"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["thesis.docx"], "thesis.docx"),
        (["config.json", "model.safetensors", "notes.md"], "notes.md"),
        (["recipe.yaml", "README.md"], "README.md"),
    ],
)
def test_a_folder_of_other_things_is_kept(tmp_path: Path, names: list[str], found: str) -> None:
    folder = fill(tmp_path / "mine", *names)
    with pytest.raises(RecipeError) as raised:
        check_destination(folder)
    assert str(raised.value) == (
        f"{folder}: is no model folder and would be replaced; '{found}' is in it. "
        "Name a new folder."
    )


def test_a_folder_inside_is_other_work_too(tmp_path: Path) -> None:
    fill(tmp_path / "mine", "config.json")
    fill(tmp_path / "mine" / "checkpoints")
    with pytest.raises(RecipeError, match="'checkpoints' is in it"):
        check_destination(tmp_path / "mine")


def test_a_file_and_the_current_folder_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = fill(tmp_path, "recipe.yaml") / "recipe.yaml"
    with pytest.raises(RecipeError, match="is a file"):
        check_destination(file)
    monkeypatch.chdir(fill(tmp_path / "here"))
    with pytest.raises(RecipeError, match="the current folder"):
        check_destination(Path())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "/proc/model",
            "/proc/model: the model cannot be written: No such file or directory. "
            "'/proc' takes no new files or folders: name another folder.",
        ),
        (
            "/proc/version/model",
            "/proc/version/model: the model cannot be written: File exists. "
            "'/proc/version' is a file, not a folder: name another folder.",
        ),
    ],
)
def test_a_place_that_cannot_be_written_is_named_as_given(given: str, message: str) -> None:
    with pytest.raises(CheckpointError) as caught, appearing_folder(Path(given)):
        pass
    assert str(caught.value) == message


def test_a_file_of_an_unfinished_model_is_named_by_its_final_place(tmp_path: Path) -> None:
    dest = tmp_path / "model"
    with pytest.raises(CheckpointError) as caught, appearing_folder(dest) as folder:
        (folder / "gone" / "weights").write_text("x")
    assert caught.value.where == str(dest / "gone" / "weights")
