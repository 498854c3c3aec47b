"""Charts are well-formed SVG that says what it shows."""

import xml.etree.ElementTree as ElementTree

import pytest

from ndtrain.plan.chart import Panel, Series, draw, short_number
from ndtrain.plan.studies import first_above, first_meeting

PANEL = Panel(
    title="Memory & size",
    x_label="tokens",
    y_label="GiB",
    series=(
        Series("cp 1", ((1e3, 10), (1e4, 100), (1e5, 1000))),
        Series("cp <2>", ((1e3, 8), (1e4, 50), (1e5, 400))),
        Series("nothing fits", ()),
    ),
    limit=(80, "80 GiB"),
    guides=((2e3, "pcie4"),),
    marks=((0, 8e3, 80, "8k"), (1, 8.5e3, 80, "8.5k")),
)
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_page_is_well_formed_and_names_everything():
    found = texts(draw([PANEL, PANEL, PANEL], title="a < b"))

    for text in ("a < b", "Memory & size", "tokens", "GiB", "cp <2>", "80 GiB", "pcie4", "8k"):
        assert text in found
    assert "nothing fits" not in found


def test_light_and_dark_pages_are_both_provided_for():
    assert "prefers-color-scheme: dark" in draw([PANEL], title="t")


def test_texts_of_near_crossings_do_not_overlap():
    root = ElementTree.fromstring(draw([PANEL], title="t"))
    places = [
        (float(element.get("x")), float(element.get("y")))
        for element in root.iter(f"{SVG}text")
        if element.text in ("8k", "8.5k")
    ]

    (x0, y0), (x1, y1) = places
    assert abs(x0 - x1) >= 34 or abs(y0 - y1) >= 12


def test_a_panel_without_any_line_is_drawn_empty():
    assert "empty" in texts(draw([Panel("empty", "x", "y", ())], title="t"))


@pytest.mark.parametrize(
    ("value", "text"),
    [(86_050, "86k"), (4.36e9, "4.4B"), (999_600, "1.0M"), (450, "450"), (1.5, "1.5")],
)
def test_short_numbers(value, text):
    assert short_number(value) == text


def test_where_a_line_crosses_a_limit():
    assert first_above([(1, 1), (100, 100)], 10) == pytest.approx(10)
    assert first_above([(1, 1), (100, 5)], 10) is None
    assert first_above([(1, 20), (100, 50)], 10) == 1
    assert first_above([], 10) is None


def test_where_one_line_overtakes_another():
    x, y = first_meeting([(1, 10), (100, 10)], [(1, 1), (100, 100)])

    assert (x, y) == (pytest.approx(10), pytest.approx(10))
    assert first_meeting([(1, 10), (100, 10)], [(1, 20), (100, 30)]) is None
    assert first_meeting([(1, 10)], [(2, 20)]) is None
