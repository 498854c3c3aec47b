"""Whatever is written down is read back: values, places and overrides."""

import string

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ndtrain.errors import RecipeError
from ndtrain.recipe.axolotl import foreign_dataset_keys, foreign_keys
from ndtrain.recipe.document import parse_document, parse_value
from ndtrain.recipe.load import examine
from ndtrain.recipe.problem import Places, dotted, parse_dotted
from ndtrain.recipe.schema import DatasetSpec, Recipe

words = st.text(string.ascii_lowercase + "_", min_size=1, max_size=8)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    # the writer, not the reader, loses control characters and exotic line ends
    | st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=12)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(words, values, min_size=1, max_size=5), st.booleans())
def test_a_written_recipe_reads_back_the_same(data: dict[str, object], flow: bool) -> None:
    text = yaml.safe_dump(data, default_flow_style=flow, allow_unicode=True)
    document = parse_document(text, "r.yaml")
    assert document.problems == []
    assert document.data == data


@given(st.dictionaries(words, scalars, min_size=1, max_size=6))
def test_places_point_at_the_keys(data: dict[str, object]) -> None:
    text = yaml.safe_dump(data, allow_unicode=True, width=10**6)
    lines = text.splitlines()
    for (key,), place in parse_document(text, "r.yaml").spots.items():
        assert str(lines[place.line - 1][place.column - 1 :]).startswith((f"{key}:", f"'{key}':"))


@given(st.floats(min_value=1e-12, max_value=1e12), st.sampled_from(["%e", "%g", "%.3e", "%r"]))
def test_every_way_to_write_a_number_is_a_number(number: float, form: str) -> None:
    text = form % number
    assert parse_value(text, "--set x") == float(text)


@given(st.lists(words | st.integers(0, 99), min_size=1, max_size=5))
def test_dotted_paths_read_back_the_same(steps: list[str | int]) -> None:
    path = ("top", *steps)
    assert parse_dotted(dotted(path)) == path


@given(st.text(max_size=60))
@example("\ud800")
@example("a: *a\n")
@example("? [x]\n: 1\n")
def test_no_text_makes_the_reader_fail_in_an_unknown_way(text: str) -> None:
    try:
        data: object = parse_document(text, "r.yaml").data
    except RecipeError as error:
        data = {"refused at": error.where}
    assert isinstance(data, dict)


KEYS = sorted(set(Recipe.fields_by_key()) | foreign_keys())
DATASET_KEYS = sorted(set(DatasetSpec.fields_by_key()) | foreign_dataset_keys())
sources = st.lists(st.dictionaries(st.sampled_from(DATASET_KEYS), values, max_size=4), max_size=2)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=6), sources)
def test_any_values_end_in_a_recipe_or_in_problems_with_a_place(
    data: dict[str, object], datasets: list[dict[str, object]]
) -> None:
    text = yaml.safe_dump({**data, "datasets": datasets}, allow_unicode=True)
    document = parse_document(text, "r.yaml")
    recipe, found = examine(document, lambda name: None)
    errors = Places("r.yaml", document.spots).report(one for one in found if not one.is_notice)
    assert recipe is not None or errors
    assert all(error.where.startswith("r.yaml:") for error in errors)


QUIET = {"base_model_config", "expert_parallel_size", "greater_is_better", "metric_for_best_model"}
"""Taken silently where their value says what happens here anyway."""


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), values, min_size=1, max_size=4))
def test_a_key_is_never_dropped_without_a_word(data: dict[str, object]) -> None:
    """It stays, or a problem or notice names it, or its value asks for nothing."""
    document = parse_document(yaml.safe_dump(data, allow_unicode=True), "r.yaml")
    _, found = examine(document, lambda name: None)
    told = {str(one.path[0]) for one in found if one.path}
    silent = {key for key in data if key not in told and key not in document.data}
    assert all(data[key] in (None, False, 0, "", [], {}) for key in silent - QUIET)
