from pathlib import Path

import pytest

from ndtrain.errors import RecipeError
from ndtrain.recipe.catalog import copy_example, find_example, list_examples, without_local_schema
from ndtrain.recipe.listing import list_lines
from ndtrain.recipe.load import load_recipe


def test_the_quickstart_comes_first() -> None:
    assert list_examples()[0].name == "quickstart"


@pytest.mark.parametrize("example", list_examples(), ids=lambda example: example.name)
def test_the_listing_says_what_the_recipe_says(example) -> None:
    recipe = load_recipe(example.path).recipe
    ranks = (
        recipe.dp_replicate_size
        * (recipe.dp_shard_size or 1)
        * recipe.context_parallel_size
        * recipe.tensor_parallel_size
    )
    on_cpu = recipe.device == "cpu" or example.name == "quickstart"
    assert example.gpus == (0 if on_cpu else ranks)
    assert example.method == (recipe.adapter or "full")
    assert example.model in (recipe.base_model or "random weights")
    assert example.title


def test_names_are_found_with_or_without_suffix() -> None:
    assert find_example("quickstart.yaml") == find_example("quickstart")


def test_a_misspelt_name_is_suggested() -> None:
    with pytest.raises(RecipeError, match="Did you mean 'quickstart'"):
        find_example("quikstart")


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160, 240])
def test_the_list_fits_the_terminal(width: int) -> None:
    head, *rows = list_lines(list_examples(), width)
    assert max(map(len, [head, *rows])) <= width
    assert [row.split()[0] for row in rows] == [one.name for one in list_examples()]
    assert head.split()[-1] == "TITLE"


def test_columns_give_way_to_the_title_in_turn() -> None:
    heads = {
        width: next(iter(list_lines(list_examples(), width))).split()
        for width in (60, 80, 120, None)
    }
    assert heads == {
        60: ["NAME", "TITLE"],
        80: ["NAME", "METHOD", "GPUS", "TITLE"],
        120: ["NAME", "MODEL", "METHOD", "GPUS", "TITLE"],
        None: ["NAME", "MODEL", "METHOD", "MESH", "GPUS", "TITLE"],
    }


def test_a_pipe_gets_every_column_whole() -> None:
    for row, one in zip([*list_lines(list_examples(), None)][1:], list_examples(), strict=True):
        assert row.endswith(f"  {one.title}")
        assert one.mesh in row
    assert [*list_lines(list_examples(), None)][1].split()[5] == "CPU"


def test_a_copy_is_the_recipe_with_a_schema_that_editors_find(tmp_path: Path) -> None:
    path = copy_example("quickstart", tmp_path)
    source = find_example("quickstart").path
    ours, theirs = source.read_text().splitlines(), path.read_text().splitlines()
    assert [a for a, b in zip(ours, theirs, strict=True) if a != b] == [ours[1]]
    schema = Path(theirs[1].partition("$schema=")[2])
    assert schema.is_file()
    assert schema.is_absolute()


def test_a_recipe_to_give_away_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    copied = copy_example("quickstart", tmp_path).read_text()
    assert without_local_schema(copied) == find_example("quickstart").path.read_text()
    for line in ("# yaml-language-server: $schema=https://x.org/a.json", "seed: 1  # $schema=/a/b"):
        assert without_local_schema(f"{line}\n") == f"{line}\n"


def test_a_copy_never_overwrites_without_force(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "mine.yaml"
    assert copy_example("quickstart", path) == path
    path.write_text("edited")
    with pytest.raises(RecipeError, match="--force"):
        copy_example("quickstart", path)
    assert path.read_text() == "edited"
    copy_example("quickstart", path, force=True)
    assert path.read_text() != "edited"


def test_a_place_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="cannot be written"):
        copy_example("quickstart", tmp_path / "file" / "mine.yaml")
