"""Whatever a run does, its report stays readable."""

import math
from xml.etree import ElementTree

import yaml
from hypothesis import given
from hypothesis import strategies as st

from ndtrain.recipe.schema import Recipe
from ndtrain.report.chart import Series, draw_chart, ticks
from ndtrain.report.curve import bucketed, smoothed
from ndtrain.report.metrics import decode_record, encode_record, records_until
from ndtrain.report.resolved import render_resolved
from ndtrain.report.wording import duration, number, short_count, sparkline

any_float = st.floats(allow_nan=True, allow_infinity=True)
losses = st.lists(any_float, max_size=80)
# XML and YAML have no place for surrogates and most control characters.
texts = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff"), max_size=30
)


@given(losses, losses, texts)
def test_any_losses_draw_a_picture_that_parses(first, second, title):
    svg = draw_chart(
        title,
        [
            Series("training", list(enumerate(first)), noisy=True),
            Series(title, list(enumerate(second)), "second", dotted=True),
        ],
    )
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height


@given(
    st.dictionaries(
        st.text(max_size=5).filter(lambda key: key != "nonfinite"),
        st.one_of(any_float, st.integers(), st.text(), st.dictionaries(st.text(), any_float)),
    )
)
def test_records_come_back_bit_for_bit(record):
    line = encode_record(record)
    assert "\n" not in line
    assert repr(decode_record(line)) == repr(record)


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(0, 30))
def test_history_until_a_step_holds_no_later_step(steps, until):
    records = [{"event": "step", "step": step} for step in sorted(steps)]
    kept = records_until(records, until)
    assert kept == [record for record in records if record["step"] <= until]


@given(texts, st.lists(texts, max_size=4), st.floats(1e-12, 1e12))
def test_resolved_recipes_read_back(model, prompts, rate):
    recipe = Recipe(
        base_model=model or "x",
        learning_rate=rate,
        sample_prompts=tuple(prompts),
        optim_args=dict.fromkeys(prompts, prompts),
    )
    text = render_resolved(recipe, {"base_model": "r.yaml:1:1"})
    assert Recipe.model_validate(yaml.safe_load(text)) == recipe


@given(losses, st.integers(1, 60))
def test_sparklines_fit(values, width):
    bars = sparkline(values, width)
    assert len(bars) <= width
    if any(math.isfinite(value) for value in values):
        assert len(bars) == min(width, len(values))
        assert set(bars) <= set("▁▂▃▄▅▆▇█ ")


@given(st.floats(-1e290, 1e290), st.floats(1e-9, 1e9))
def test_ticks_are_inside(low, share):
    high = low + abs(low) * share + 1e-9
    marks = ticks(low, high) if high > low else []
    room = (high - low) * 1e-6 + abs(high) * 1e-12
    assert all(low - room <= mark <= high + room for mark in marks)
    assert len(marks) <= 12


@given(st.lists(any_float, min_size=1, max_size=3000))
def test_thinning_keeps_order_ends_and_extremes(values):
    points = [(float(step), value) for step, value in enumerate(values)]
    thin = bucketed(points, most=100)
    assert len(thin) <= 160 or len(points) <= 160
    steps = [step for step, _ in thin]
    assert steps == sorted(set(steps))
    assert steps[0] == 0
    assert steps[-1] == len(points) - 1
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        kept = [value for _, value in thin if math.isfinite(value)]
        assert min(kept) == min(finite)
        assert max(kept) == max(finite)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_a_smooth_curve_stays_between_the_extremes(values):
    smooth = [value for _, value in smoothed(list(enumerate(values)))]
    room = 1e-9 * max(1.0, *(abs(value) for value in values))
    assert all(min(values) - room <= value <= max(values) + room for value in smooth)


@given(any_float)
def test_every_number_has_words(value):
    assert number(value)
    assert short_count(value)
    assert duration(abs(value))
