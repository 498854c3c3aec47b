"""Where profiled steps went, from the record of a `profile` event."""

from collections.abc import Iterator, Mapping
from typing import Any


def step_time(record: Mapping[str, Any]) -> str:
    """The shares in one line; those below half a percent are left out."""
    named = [f"{kind} {share}" for kind, share in _percents(record["shares"]) if share != "0 %"]
    text = ", ".join(named)
    if record["device"] == "cpu":
        text += f" of the operators' time, waiting for data {_percent(record['data_wait'])}"
    rate = _matmul_share(record)
    return text if rate is None else f"{text}; {rate} of the card's matmul rate"


def step_time_rows(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The same as names and values."""
    first, last = record["first_step"], record["step"]
    which = f"step {last}" if first == last else f"steps {first} to {last}, each"
    yield which, f"{1000 * record['step_seconds']:,.1f} ms"
    yield from _percents(record["shares"])
    if record["device"] == "cpu":
        yield "waiting for data", _percent(record["data_wait"])
    if record["hidden_communication"]:
        yield "exchange beside other kernels", _percent(record["hidden_communication"])
    rate = _matmul_share(record)
    if rate is not None:
        yield "of the card's matmul rate", rate


def _percents(shares: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    return ((kind, _percent(share)) for kind, share in shares.items())


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _matmul_share(record: Mapping[str, Any]) -> str | None:
    work, matmul = record["tflops_per_device"], record["matmul_tflops"]
    return _percent(work / matmul) if work is not None and matmul else None
