import math

import pytest

from ndtrain.report import wording


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (272, "4m32s"),
        (11100, "3h05m"),
        (187200, "2d04h"),
    ],
)
def test_duration(seconds, text):
    assert wording.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (987, "987"),
        (0.25, "0.25"),
        (9870, "9.87k"),
        (999_960, "1.00M"),
        (134_515_008, "135M"),
        (8.03e9, "8.03B"),
        (2e12, "2.00T"),
        (math.inf, "inf"),
    ],
)
def test_short_count(value, text):
    assert wording.short_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (2.5, "2.5"),
        (1234, "1,234"),
        (123456, "123,456"),
        (1e-4, "1e-4"),
        (2.5e-5, "2.5e-5"),
        (1e300, "1e300"),
        (-3e7, "-3e7"),
        (math.nan, "nan"),
    ],
)
def test_number(value, text):
    assert wording.number(value) == text


def test_change():
    assert wording.change(2.0, 1.5) == "−25.0 %"
    assert wording.change(2.0, 3.0) == "+50.0 %"
    assert wording.change(0.0, 1.0) == ""
    assert wording.change(math.nan, 1.0) == ""


def test_sparkline():
    assert wording.sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert wording.sparkline([3.0, 3.0]) == "▁▁"
    assert wording.sparkline([1.0, math.nan, 2.0]) == "▁ █"
    assert wording.sparkline([math.nan]) == ""
    assert wording.sparkline([]) == ""
    assert len(wording.sparkline([float(value) for value in range(1000)], width=40)) == 40
    assert wording.sparkline([-1.7e308, 1.7e308]) == "▁█"
