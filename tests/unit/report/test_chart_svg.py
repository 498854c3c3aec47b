import math
import re
from xml.etree import ElementTree

import pytest

from ndtrain.report.chart import CHART_STYLE, Series, draw_chart, ticks
from ndtrain.report.curve import bucketed, smoothed
from ndtrain.report.history import History, gather
from ndtrain.report.metrics import event_record
from ndtrain.report.svg import LossPicture, loss_chart

NAMESPACE = {"s": "http://www.w3.org/2000/svg"}


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def points_of(element: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in element.attrib["points"].split())
    return [(float(x), float(y)) for x, y in pairs]


def test_points_stand_where_their_values_are():
    svg = draw_chart("t", [Series("a", [(0, 0.0), (50, 5.0), (100, 10.0)])], width=720, height=360)
    (line,) = parse(svg).findall(".//s:polyline", NAMESPACE)
    (x0, y0), (x1, y1), (x2, y2) = points_of(line)
    assert (x0, x1, x2) == (62.0, 358.0, 654.0)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.011)
    assert y0 > y1 > y2
    assert y0 == 326.0  # the floor: what is never negative starts at zero


def test_both_curves_and_their_last_values():
    history = History()
    for number in range(1, 101):
        history.steps.append({"step": number, "loss": 2.0 - number / 100})
    history.evals = [{"step": 0, "loss": 2.0}, {"step": 100, "loss": 1.5}]
    root = parse(loss_chart(history, "Loss of x & y"))
    assert root.attrib["aria-label"] == "Loss of x & y"
    groups = {
        group.attrib["data-name"]: group for group in root.findall(".//s:g[@data-name]", NAMESPACE)
    }
    assert set(groups) == {"training", "held-out"}
    training = groups["training"].findall("s:polyline", NAMESPACE)
    assert [line.attrib["class"] for line in training] == ["raw", "line"]
    assert len(points_of(training[0])) == 100
    assert len(groups["held-out"].findall("s:circle", NAMESPACE)) == 2
    texts = [text.text for text in root.findall(".//s:text", NAMESPACE)]
    assert "training (smoothed)" in texts
    assert "1.5" in texts


def test_an_empty_chart_says_so():
    assert "nothing yet" in draw_chart("t", [Series("a", [])])
    parse(loss_chart(History()))


def test_one_point_is_a_dot():
    root = parse(draw_chart("t", [Series("a", [(1, 2.0)])]))
    assert len(root.findall(".//s:circle", NAMESPACE)) == 1


def test_nonfinite_values_break_the_line_and_are_marked():
    values = [(1, 2.0), (2, 1.0), (3, math.nan), (4, 3.0), (5, 2.0), (6, math.inf)]
    root = parse(draw_chart("t", [Series("a", values)]))
    lines = root.findall(".//s:polyline", NAMESPACE)
    assert [len(points_of(line)) for line in lines] == [2, 2]
    titles = [title.text for title in root.findall(".//s:title", NAMESPACE)]
    assert titles == ["step 3: nan", "step 6: inf"]


def test_labels_of_close_ends_do_not_overlap():
    close = [Series("a", [(0, 1.0), (9, 1.0)]), Series("b", [(0, 9.0), (9, 1.01)], "second")]
    ends = parse(draw_chart("t", close)).findall(".//s:text[@class='end']", NAMESPACE)
    first, second = sorted(float(end.attrib["y"]) for end in ends)
    assert second - first >= 15


def test_names_are_escaped():
    root = parse(draw_chart("<&\"'>", [Series("a<b", [(0, 1.0)]), Series('"', [(0, 2.0)])]))
    assert root.find("s:text", NAMESPACE).text == "<&\"'>"


def test_light_and_dark_have_colours_of_their_own():
    light, dark = CHART_STYLE.split("@media (prefers-color-scheme: dark)")
    surfaces = [re.search(r"\.surface { fill: (#\w+)", part)[1] for part in (light, dark)]
    assert surfaces == ["#fcfcfb", "#1a1a19"]
    inks = [re.search(r"\.first { --ink: (#\w+)", part)[1] for part in (light, dark)]
    assert inks[0] != inks[1]


def test_the_picture_needs_no_other_file():
    history = History(steps=[{"step": 1, "loss": 1.0}])
    svg = loss_chart(history).replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "http" not in svg
    assert "url(" not in svg
    assert "@import" not in svg


def test_ticks_are_round_and_inside():
    assert ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert ticks(1.04, 1.96) == pytest.approx([1.2, 1.4, 1.6, 1.8])
    assert ticks(-1e300, 1e300) == pytest.approx([-1e300, -5e299, 0, 5e299, 1e300])


def test_smoothing_keeps_a_constant_and_gaps():
    steady = [(step, 2.5) for step in range(100)]
    assert [value for _, value in smoothed(steady)] == pytest.approx([2.5] * 100)
    falling = [(step, 100.0 - step) for step in range(101)]
    assert smoothed(falling)[50] == (50, pytest.approx(50.0))
    gap = smoothed([(0, 1.0), (1, math.nan), (2, 1.0)], share=1.0)
    assert math.isnan(gap[1][1])
    assert gap[2] == (2, 1.0)


def test_thinning_keeps_spikes_and_ends():
    points = [(float(step), 1.0 + step % 3) for step in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[7777] = (7777.0, math.nan)
    thin = bucketed(points)
    assert len(thin) < 700
    assert thin[0] == points[0]
    assert thin[-1] == points[-1]
    assert (4321.0, 99.0) in thin
    assert any(math.isnan(value) for _, value in thin)
    assert [step for step, _ in thin] == sorted(step for step, _ in thin)


def test_the_picture_is_drawn_at_evaluations_and_at_the_end(tmp_path, events):
    path = tmp_path / "loss.svg"
    history = History()
    picture = LossPicture(path, history, "Loss")
    drawn = []
    for event in events:
        history.add(event_record(event))
        picture.write(event)
        if path.exists():
            drawn.append(event.event)
            path.unlink()
    assert drawn == ["eval", "eval", "eval", "end"]


def test_gathering_leaves_unknown_kinds_out():
    assert gather([{"event": "of a later version", "step": 1}]) == History()
