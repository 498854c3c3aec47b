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
