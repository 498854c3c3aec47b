"""The three questions of choosing a mesh, as one picture for a model and some GPUs."""

from collections.abc import Iterator
from itertools import combinations

from ndtrain.plan.chart import Panel, Series, draw, short_number
from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.hardware import find_link
from ndtrain.plan.plan import ParallelPlan
from ndtrain.plan.planning import Planned
from ndtrain.plan.studies import (
    LINK_GBS,
    Study,
    candidate_meshes,
    first_above,
    first_meeting,
    memory_over_length,
    memory_over_size,
    speed_over_length,
    speed_over_link,
    working,
)

_KNOWN_LINKS = ("pcie4", "pcie5", "nvlink3", "nvlink4", "nvlink5")


def draw_plan(planned: Planned) -> str:
    """Memory over model size and sequence length, speed over sequence length and link."""
    study = Study(planned.recipe, planned.cluster, planned.constants)
    return draw_study(study, planned.facts, planned.recipe.sequence_len)


def draw_study(study: Study, facts: ModelFacts, length: int) -> str:
    """The picture for a model on some GPUs."""
    gpus = f"{study.world} × {study.cluster.gpu.name}"
    title = f"{facts.name} on {gpus}: predicted, not measured"
    panels = [
        size_panel(study, length),
        length_panel(study, facts),
        speed_panel(study, facts),
    ]
    if study.world > 1:
        panels.append(link_panel(study, facts, length))
    return draw(panels, title=title)


def size_panel(study: Study, length: int) -> Panel:
    """At which model size data parallelism alone stops working."""
    series = [
        Series(name, memory_over_size(study, mesh, length))
        for name, mesh in candidate_meshes(study).items()
    ]
    return Panel(
        title="Which model size fits?",
        x_label=f"parameters (llama-like, {length:,} tokens)",
        y_label="least GiB of a GPU (one row, all recomputed)",
        series=tuple(series),
        limit=(study.limit, f"{study.limit:.0f} GiB usable"),
        marks=tuple(_limit_marks(series, study.limit)),
    )


def length_panel(study: Study, facts: ModelFacts) -> Panel:
    """At which sequence length the row must be split."""
    series = []
    for cp in _powers(study.world, 16):
        mesh = ParallelPlan(1, study.world // cp, cp)
        name = "whole rows" if cp == 1 else f"cp {cp}"
        series.append(Series(name, memory_over_length(study, facts, mesh)))
    return Panel(
        title="Which sequence length fits?",
        x_label="tokens of a row",
        y_label="least GiB of a GPU (one row, all recomputed)",
        series=tuple(series),
        limit=(study.limit, f"{study.limit:.0f} GiB usable"),
        marks=tuple(_limit_marks(series, study.limit)),
    )


def speed_panel(study: Study, facts: ModelFacts) -> Panel:
    """Which mesh is fastest at which sequence length."""
    series = tuple(
        Series(name, speed_over_length(study, facts, mesh))
        for name, mesh in working(candidate_meshes(study), facts).items()
    )
    return Panel(
        title="Which is fastest? (a line ends where nothing fits)",
        x_label="tokens of a row",
        y_label="tokens/s of a GPU",
        series=series,
        marks=tuple(_meeting_marks(series)),
    )


def link_panel(study: Study, facts: ModelFacts, length: int) -> Panel:
    """How much tensor-parallel traffic a link bears."""
    node, world = study.node, study.world
    meshes = {"shard only": ParallelPlan(1, world)}
    for tp in _powers(node, 8)[1:]:
        meshes[f"tp {tp}"] = ParallelPlan(1, world // tp, 1, tp)
    series = tuple(
        Series(name, speed_over_link(study, facts, mesh, length))
        for name, mesh in working(meshes, facts).items()
    )
    guides = [(find_link(name, "").gbs, name) for name in _KNOWN_LINKS]
    return Panel(
        title="How much traffic does the node's link bear?",
        x_label=f"GB/s of the link ({length:,} tokens a row)",
        y_label="tokens/s of a GPU",
        series=series,
        guides=tuple(guide for guide in guides if LINK_GBS[0] <= guide[0] <= LINK_GBS[-1]),
        marks=tuple(_meeting_marks(series)),
    )


def _limit_marks(series: list[Series], limit: float) -> Iterator[tuple[int, float, float, str]]:
    for number, line in enumerate(series):
        x = first_above(line.points, limit)
        if x is not None and x > line.points[0][0]:
            yield number, x, limit, short_number(x)


def _meeting_marks(series: tuple[Series, ...]) -> Iterator[tuple[int, float, float, str]]:
    """Where a later line overtakes an earlier one, or the other way round."""
    for (first, one), (second, other) in combinations(enumerate(series), 2):
        for number, low, high in ((second, one, other), (first, other, one)):
            point = first_meeting(low.points, high.points)
            if point is not None:
                yield number, *point, short_number(point[0])


def _powers(most: int, limit: int) -> list[int]:
    """1, 2, 4, ... as far as they divide."""
    size, found = 1, []
    while size <= min(most, limit) and most % size == 0:
        found.append(size)
        size *= 2
    return found
