"""What kinds of attention the engine computes, and how: the one table of it.

A kind that a mesh or a kernel cannot honour is refused here; none is ever dropped silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ndtrain.plan.facts import ModelFacts

Kind = Literal["sliding window", "softcap", "sinks"]
Situation = Literal["alone", "ulysses", "allgather"]


@dataclass(frozen=True)
class Support:
    """Whether a kind of attention works in a situation.

    Attributes:
        works: the result is that of one process.
        note: what a user should know of it, e.g. that it is slow; empty when nothing.
    """

    works: bool
    note: str = ""


_EXACT = Support(True)
_DENSE = Support(True, "computed with a whole score matrix a head: memory grows with length²")

SUPPORTED: Mapping[Kind, Mapping[Situation, Support]] = {
    "sliding window": {"alone": _EXACT, "ulysses": _EXACT, "allgather": _EXACT},
    "softcap": {"alone": _DENSE, "ulysses": _DENSE, "allgather": _DENSE},
    "sinks": {"alone": _DENSE, "ulysses": _DENSE, "allgather": _DENSE},
}


def attention_kinds(facts: ModelFacts) -> tuple[Kind, ...]:
    """The kinds of attention beyond plain causal that the model has."""
    kinds: list[Kind] = []
    if facts.sliding_window is not None:
        kinds.append("sliding window")
    if facts.softcap:
        kinds.append("softcap")
    if facts.sinks:
        kinds.append("sinks")
    return tuple(kinds)


def support_of(facts: ModelFacts, cp_method: str) -> dict[Kind, Support]:
    """How each kind of attention of the model works with a context-parallel method."""
    situations: dict[str, Situation] = {
        "none": "alone",
        "ulysses": "ulysses",
        "allgather": "allgather",
    }
    return {kind: SUPPORTED[kind][situations[cp_method]] for kind in attention_kinds(facts)}
