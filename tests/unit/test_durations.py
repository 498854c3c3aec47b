import pytest
import typer

from ndtrain.commands.options import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h50m", 13800), ("90m", 5400), ("2d", 172800), ("45s", 45), ("10", 10), ("1h30s", 3630)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", " ", "soon", "3x", "m", "0", "0h", "-5m", "1m1h", "3h50"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="not a duration"):
        parse_duration(text)
