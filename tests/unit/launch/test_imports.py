"""Heavy imports are made without looking for garbage, and the collector is as before afterwards."""

import gc

import pytest

from ndtrain.launch.imports import without_collection


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_rests_and_what_was_made_is_left_out_later(collects: bool) -> None:
    found = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    frozen = gc.get_freeze_count()
    try:
        with without_collection():
            assert not gc.isenabled()
            made = [[number] for number in range(1000)]
        assert gc.isenabled() == collects
        assert gc.get_freeze_count() >= frozen + len(made)
        with pytest.raises(ImportError), without_collection():
            raise ImportError
        assert gc.isenabled() == collects
    finally:
        gc.unfreeze()
        (gc.enable if found else gc.disable)()
