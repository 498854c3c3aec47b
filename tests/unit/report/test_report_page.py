import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from ndtrain.errors import CheckpointError
from ndtrain.report.events import Notice, RunEnded
from ndtrain.report.html import PageAtEnd, render_page, write_page
from ndtrain.report.html_data import data_cards, draw_lengths
from ndtrain.report.planned_memory import planned_gib
from ndtrain.report.prediction import judge_prediction
from ndtrain.report.recorded import read_run

VOID = {"meta", "link", "br", "input", "img"}


class Outline(HTMLParser):
    """Texts by tag; fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in {"style", "script"} and data.strip():
            self.texts.append(data.strip())


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_tells_the_run(finished):
    texts = outline(render_page(read_run(finished.path))).texts
    for expected in (
        "small",
        "finished",
        "Held-out loss",
        "1.8",
        "−40.0 % from 3",
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Tokens a second",
        "Mesh",
        "1 × 2 accumulated × 2 data ranks = 4 rows a step",
        "Memory of one rank",
        "Data",
        "rows an epoch",
        "988",
        "70, 97.2 % filled",
        "20,000 (25.0 %)",
        "988 of 1,000",
        "dropped: too long",
        "129 to 192 tokens: 88 rows",
        "Sample answers",
        "It splits <big> matrices\n& more.",
        "Recipe",
    ):
        assert expected in texts, expected
    head = (
        "Full fine-tuning of acme/tiny-llama · dp_replicate 1 × dp_shard 2 × cp 1 × tp 1 = 2 ranks"
    )
    assert f"{head} · cpu" in texts


def test_planned_and_measured_memory_stand_side_by_side(finished):
    page = render_page(read_run(finished.path))
    assert "3.00 GiB predicted, 1.50 measured (+100.0 %)" in page
    # each bar is named, and the second one has a colour that no part has
    planned, measured = page.split('<div class="of">')[1:3]
    assert planned.startswith("predicted, by what it is for</div>")
    assert measured.startswith('measured</div><div class="bar"><i class="measured" style="width:50')


def test_the_page_says_what_the_summary_says_of_memory(finished):
    file = finished.path / "plan.json"
    predicted = {"device": "cpu", "memory_gib": 2.81, "step_seconds": None}
    file.write_text(json.dumps({**json.loads(file.read_text()), "predicted": predicted}))

    run = read_run(finished.path)
    said = str(judge_prediction(run.plan, run.history))
    assert said == "memory 2.81 GiB predicted, 1.50 measured (+87.3 %)"
    assert said.removeprefix("memory ") in render_page(run)


def test_the_page_says_where_a_profiled_step_went(finished):
    page = render_page(read_run(finished.path))
    _, _, rest = page.partition("<h2>Where a step goes</h2>")
    told = re.findall(r'<th>(.*?)</th><td class="number">(.*?)</td>', rest.partition("</table>")[0])
    assert told == [
        ("steps 4 to 5, each", "557.2 ms"),
        ("matmul", "68 %"),
        ("attention", "24 %"),
        ("other kernels", "6 %"),
        ("copies", "0 %"),
        ("waiting for the host", "1 %"),
        ("exchange beside other kernels", "8 %"),
        ("of the card&#x27;s matmul rate", "64 %"),
    ]
    finished.metrics.write_text("")
    assert "Where a step goes" not in render_page(read_run(finished.path))


def test_settings_that_were_chosen_stand_out(finished):
    page = render_page(read_run(finished.path))
    assert (
        '<span class="set">base_model: acme/tiny-llama<span class="origin">  # r.yaml:1:1' in page
    )
    assert '<span class="set">learning_rate: 0.0001<span class="origin">  # --set' in page
    assert '<span class="default">seed: 42<span class="origin">  # default' in page


def test_the_page_asks_the_network_for_nothing(finished):
    page = render_page(read_run(finished.path))
    outward = re.sub(r'(xmlns=|")"?http://www\.w3\.org/2000/svg"', "", page)
    assert "http" not in outward.replace("http-equiv", "")
    links = [value for name, value in outline(page).attributes if name in {"src", "href", "srcset"}]
    assert links == ["data:,"]
    assert "@import" not in page
    assert "url(" not in page
    assert "default-src 'none'" in page


def test_text_of_the_user_cannot_become_markup(finished, events):
    evil = "</pre><script>alert(1)</script>"
    finished.write_data({"source": evil})
    page = render_page(read_run(finished.path))
    assert evil not in page
    assert page.count("<script>") == 1
    assert evil in outline(page).texts


def test_a_run_that_has_only_begun_can_be_looked_at(run_dir, recipe):
    run_dir.write_resolved(recipe, {})
    page = render_page(read_run(run_dir.path))
    texts = outline(page).texts
    assert "running" in texts
    assert "nothing yet" in texts


def test_the_state_shows_how_it_ended(finished):
    run = read_run(finished.path)
    for code, kind in ((0, "done"), (143, "stopped"), (7, "failed")):
        run.history.ends.append({"step": 6, "reason": "max_time", "exit_code": code})
        assert f'<span class="state {kind}">max time</span>' in render_page(run)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is not a run directory"):
        write_page(tmp_path)


def test_a_page_that_cannot_be_drawn_does_not_fail_the_run(finished):
    finished.plan.write_text("{broken")
    told = []
    page = PageAtEnd(finished.path, told.append)
    page.write(RunEnded("finished", 6, 0))
    assert not finished.report_html.exists()
    (notice,) = told
    assert isinstance(notice, Notice)
    assert str(finished.plan) in notice.text
    finished.plan.unlink()
    page.write(RunEnded("finished", 6, 0))
    assert finished.report_html.exists()


def test_planned_memory_by_part():
    gib = 2**30
    assert planned_gib({"weights": 2 * gib, "grads_gib": 1.5, "total": 9 * gib, "none": 0}) == {
        "weights": 2.0,
        "grads": 1.5,
    }
    assert planned_gib({"parts": {"a_b": gib}, "limit": 1}) == {"a b": 1.0}
    assert planned_gib(None) == {}


def test_bars_are_as_high_as_their_rows():
    root = ElementTree.fromstring(draw_lengths([[64, 300], [128, 600], [192, 0]]))
    heights = [
        float(rect.attrib["height"]) for rect in root.iter("{http://www.w3.org/2000/svg}rect")
    ]
    assert heights == [52.0, 104.0, 0.0]
    assert draw_lengths([]) == ""
    assert draw_lengths([[64, 0]]) == ""


def test_data_of_another_shape_is_shown_as_it_is():
    card = data_cards({"v": 1, "rows": 5, "by_kind": {"chat": 0.5}})
    assert outline(card).texts == ["rows", "5", "by kind: chat", "0.5"]
