from xml.etree import ElementTree

from ndtrain.plan.plan import ParallelPlan
from ndtrain.report.mesh_picture import draw_mesh, hidden_ranks

NAMESPACE = {"s": "http://www.w3.org/2000/svg"}


def cells(parallel: ParallelPlan) -> dict[int, tuple[float, float]]:
    root = ElementTree.fromstring(draw_mesh(parallel))
    found = {}
    for group in root.findall("s:g", NAMESPACE):
        rect = group.find("s:rect", NAMESPACE)
        place = (float(rect.attrib["x"]), float(rect.attrib["y"]))
        found[int(group.find("s:text", NAMESPACE).text)] = place
    return found


def test_each_rank_once_at_its_coordinates():
    parallel = ParallelPlan(dp_replicate=2, dp_shard=3, cp=2, tp=2)
    places = cells(parallel)
    assert sorted(places) == list(range(24))
    assert len(set(places.values())) == 24
    for rank, (x, y) in places.items():
        at = parallel.coordinates(rank)
        # Same copy and column: same x; same copy and row: same y.
        column = [
            other
            for other in places
            if {**parallel.coordinates(other), "dp_shard": 0} == {**at, "dp_shard": 0}
        ]
        assert {places[other][0] for other in column} == {x}
        row = [
            other
            for other in places
            if {**parallel.coordinates(other), "cp": 0, "tp": 0} == {**at, "cp": 0, "tp": 0}
        ]
        assert {places[other][1] for other in row} == {y}


def test_everything_is_inside_the_picture():
    for parallel in (ParallelPlan(), ParallelPlan(8, 8, 2, 8), ParallelPlan(dp_shard=16, tp=8)):
        root = ElementTree.fromstring(draw_mesh(parallel))
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for rect in root.findall(".//s:rect", NAMESPACE):
            right = float(rect.attrib["x"]) + float(rect.attrib["width"])
            bottom = float(rect.attrib["y"]) + float(rect.attrib["height"])
            assert 0 < right <= width
            assert 0 < bottom <= height


def test_huge_meshes_are_drawn_in_part():
    assert hidden_ranks(ParallelPlan(2, 4, 2, 2)) == 0
    huge = ParallelPlan(dp_replicate=64, dp_shard=8, tp=8)
    assert hidden_ranks(huge) == 4096 - 512
    assert len(cells(huge)) == 512


def test_hosts_are_named():
    ranks = [{"host": "alpha<1>"}, {"host": "beta"}]
    svg = draw_mesh(ParallelPlan(tp=2), ranks)
    titles = [title.text for title in ElementTree.fromstring(svg).findall(".//s:title", NAMESPACE)]
    assert titles == [
        "rank 0 on alpha<1>: dp_replicate 0, dp_shard 0, cp 0, tp 0",
        "rank 1 on beta: dp_replicate 0, dp_shard 0, cp 0, tp 1",
    ]
