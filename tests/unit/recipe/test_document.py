import pytest

from ndtrain.errors import RecipeError
from ndtrain.recipe.document import parse_document, parse_value
from ndtrain.recipe.problem import Place


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("2E5", 2e5),
        ("1.5e+3", 1500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-3", -3),
        ("0", 0),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("On", "On"),
        ("012", "012"),
        ("0x1F", "0x1F"),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        (".inf", ".inf"),
        ("'1e-5'", "1e-5"),
        ("!!str 5", "5"),
        ("<|end|>", "<|end|>"),
        ("[1, no, 1e-3]", [1, "no", 1e-3]),
    ],
)
def test_scalars_are_decimal_numbers_plain_words_or_the_text_as_written(
    text: str, value: object
) -> None:
    read = parse_value(text, "--set x")
    assert read == value
    assert type(read) is type(value)


def test_every_key_and_item_knows_its_place() -> None:
    document = parse_document("a: 1\nlist:\n  - x: 2\n    y: 3\n  - 4\n", "r.yaml")
    assert document.spots == {
        ("a",): Place.in_file(1, 1),
        ("list",): Place.in_file(2, 1),
        ("list", 0): Place.in_file(3, 5),
        ("list", 0, "x"): Place.in_file(3, 5),
        ("list", 0, "y"): Place.in_file(4, 5),
        ("list", 1): Place.in_file(5, 5),
    }


def test_anchors_and_merge_keys_work_and_explicit_keys_win() -> None:
    document = parse_document(
        "first: &base {path: a, type: alpaca}\n"
        "second:\n  <<: *base\n  path: b\n"
        "third:\n  <<: [{type: completion}, *base]\n",
        "r.yaml",
    )
    assert document.data["second"] == {"path": "b", "type": "alpaca"}
    assert document.data["third"] == {"path": "a", "type": "completion"}
    assert not document.problems


def test_a_duplicate_key_names_both_lines_and_the_first_value_is_kept() -> None:
    document = parse_document("a: 1\nb: 2\na: 3\n", "r.yaml")
    assert document.data == {"a": 1, "b": 2}
    (problem,) = document.problems
    assert problem.message == "duplicate key, given in lines 1 and 3."
    assert problem.place == Place.in_file(3, 1)


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("", "1:1", "the recipe is empty"),
        ("# only a comment\n", "1:1", "the recipe is empty"),
        ("- a\n- b\n", "1:1", "a list at the top"),
        ("hello\n", "1:1", "a single value at the top"),
        ("a:\n\tb: 1\n", "2:1", "a tab cannot indent YAML. Use spaces."),
        ("a: @x\n", "1:4", "cannot start with '@'. Put the value in quotes."),
        ("a: %x\n", "1:4", "cannot start with '%'. Put the value in quotes."),
        ("a: b: c\n", "1:5", "a second ':' in this line"),
        ("a: [1, 2\n", "2:1", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "2:1", "a second document starts here"),
        ("a: *unknown\n", "1:4", "undefined alias"),
        ("a: 1\nepochs 2\n\nb: 3\n", "2:1", "'epochs 2' has no ': '. Write `key: value`"),
        ("a: 1\nepochs:2\nb: 3\n", "2:1", "'epochs:2' has no ': '."),
        ("a: 1\nepochs:2\n", "2:1", "'epochs:2' has no ': '."),
        ("epochs:2\nb: 3\n", "1:1", "'epochs:2' has no ': '."),
        ('a: 1\nb: "x\nc: 3\nd: 4\n', "2:4", "a quote is opened here and never closed."),
        ("a: 1\n  b: 2\nc: 3\n", "2:3", "indented by 2, its neighbours by 0."),
        ("a: 1\n# why\n\n  b: 2\n", "4:3", "indented by 2, its neighbours by 0."),
        ("a:\n    b: 2\n  c: 3\n", "3:3", "indented by 2, its neighbours by 0 or 4."),
        ("a:\n  - b: 1\n      c: 2\n", "3:7", "indented by 6, its neighbours by 4."),
        ("a:\n  - b: 1\n    c: 2\n   d: 3\n", "4:4", "indented by 3, its neighbours by 2 or 4."),
        ("  a: 1\nb: 2\n", "2:1", "indented by 0, its neighbours by 2."),
        ("a: x\x00y\n", "1:5", "'0x0000' is not allowed"),
    ],
)
def test_what_is_not_a_recipe_says_where_and_why(text: str, place: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_document(text, "r.yaml")
    assert caught.value.where == f"r.yaml:{place}"
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: !!python/object/apply:os.system [ls]\n", "is not allowed"),
        ("a: !!python/name:os.system x\n", "is not allowed"),
        ("a: !!timestamp 2024-01-01\n", "is not allowed"),
        ("a: {{x}}\n", "a key must be plain text"),
        ("a: &x [*x]\n", "aliases make this value endless"),
        ("a: !!int x\n", "'x' is not a number"),
        ("<<: 3\n", "'<<' needs a mapping"),
    ],
)
def test_odd_values_are_problems_with_a_place(text: str, words: str) -> None:
    document = parse_document(text, "r.yaml")
    assert words in document.problems[0].message
    assert document.problems[0].place is not None


@pytest.mark.parametrize("depth", [60, 400, 3000])
def test_endless_brackets_are_a_message_at_any_depth(depth: int) -> None:
    text = f"seed: 1\ntokens: {'[' * depth}{']' * depth}\n"
    try:
        (problem,) = parse_document(text, "r.yaml").problems
    except RecipeError as error:
        said = error.message
    else:
        said = f"{problem.path[0]} {problem.message}"
    assert "nested too deeply." in said


def test_aliases_that_multiply_stop_early() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    document = parse_document("\n".join(lines), "r.yaml")
    assert "aliases make this value endless." in {one.message for one in document.problems}
