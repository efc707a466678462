"""Layers that are run: one of each kind in every chunk, then another one of each."""

import pytest

from mindspeed_tune.layer_kinds import variants


@pytest.mark.parametrize(
    ("chunks", "run"),
    [
        ([{"dense": 4}], [{"dense": 1}, {"dense": 2}]),
        ([{"dense": 2}], [{}]),
        ([{"dense": 4, "moe": 1}], [{"dense": 1, "moe": 1}, {"dense": 2, "moe": 1}]),
        ([{"dense": 3}, {"dense": 3}], [{"dense": 2}, {"dense": 4}]),
        ([{"dense": 3}, {"dense": 2}], [{}]),
        ([{"dense": 3}, {"moe": 3}], [{}]),
    ],
)
def test_layers_of_equal_chunks_are_reduced(chunks, run):
    assert variants(chunks) == run
