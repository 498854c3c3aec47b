from pathlib import Path

import pytest


def test_a_close_name_in_the_same_folder_is_suggested(complaints, minimal, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    text = minimal.replace("synthetic", str(tmp_path / "row.jsonl"))
    (line,) = complaints(text)
    assert line.endswith("does not exist. Did you mean 'rows.jsonl'?")


@pytest.mark.parametrize(
    "lines",
    [
        "test_datasets: [{path: /gone.jsonl}]",
        "chat_template: jinja\nchat_template_jinja: /gone.jinja",
        "    chat_template_jinja: gone.jinja",
        "    chat_template_jinja: ~/gone.jinja",
        "    chat_template_jinja: package://ndtrain/gone.jinja",
        "    chat_template_jinja: https://example.org/gone.jinja",
        "    chat_template_jinja: gone",
        "test_datasets: [{path: json, data_files: [/gone.json]}]",
        "test_datasets: [{path: package://ndtrain/examples/data/gone.jsonl}]",
        "test_datasets: [{path: package://no_such_package/rows.jsonl}]",
    ],
)
def test_every_named_file_is_looked_for(complaints, minimal, lines: str) -> None:
    (line,) = complaints(f"{minimal}{lines}\n")
    assert line.startswith("recipe.yaml:")
    assert "gone" in line or "not installed" in line


@pytest.mark.parametrize(
    "lines",
    [
        "test_datasets: [{path: owner/name}]",
        "test_datasets: [{path: json, data_files: 'parts/*.json'}]",
        "test_datasets: [{path: 'https://example.org/rows.jsonl'}]",
        "chat_template: jinja\nchat_template_jinja: '{{ messages[0].content }}'",
    ],
)
def test_what_is_no_local_file_is_left_alone(load, minimal, lines: str) -> None:
    assert load(f"{minimal}{lines}\n").recipe


def test_existing_files_are_fine(load, minimal, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    loaded = load(minimal.replace("synthetic", str(tmp_path / "rows.jsonl")))
    assert loaded.recipe.datasets[0].path == str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("name: main", "name: has no effect: '{path}' is no hub dataset. Remove it."),
        ("revision: v1", "revision: has no effect: '{path}' is no hub dataset. Remove it."),
        ("data_files: a", "data_files: has no effect: the path is a file. Remove it."),
        ("split: test", "split: 'test' has no effect: the path is a file. Remove it."),
        (
            "split: 'train[:2]'",
            "split: 'train[:2]' can only be taken of a hub dataset, not of files. Name a whole "
            "split; samples takes a number of rows, val_set_size holds some out.",
        ),
    ],
)
def test_a_key_that_says_nothing_of_a_local_file_is_named(
    key: str, message: str, complaints, minimal, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    text = minimal.replace("synthetic", str(tmp_path / "rows.jsonl"))
    assert complaints(f"{text}    {key}\n") == [
        f"recipe.yaml:6:5: datasets[0].{message.format(path='rows.jsonl')}"
    ]


def test_the_split_that_a_file_is_named_after_may_be_given(load, minimal, tmp_path: Path) -> None:
    (tmp_path / "rows-val.jsonl").write_text("")
    text = minimal.replace("synthetic", str(tmp_path / "rows-val.jsonl"))
    assert load(f"{text}    split: validation\n").recipe.datasets[0].split == "validation"


@pytest.mark.parametrize("key", ["split: test", "name: main"])
def test_keys_beside_data_files_are_named(key: str, complaints, minimal, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    files = f"{{path: json, data_files: ['{tmp_path}/*.jsonl'], {key}}}"
    (line,) = complaints(f"{minimal}test_datasets: [{files}]\n")
    assert line.startswith("recipe.yaml:6:")
    assert f"test_datasets[0].{key.split(':')[0]}: " in line
    assert "has no effect" in line


def test_a_folder_may_have_splits(load, minimal, tmp_path: Path) -> None:
    text = minimal.replace("synthetic", str(tmp_path))
    assert load(f"{text}    split: test\n").recipe.datasets[0].split == "test"
