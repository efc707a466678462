"""Partitions, volumes and old gated weights, without a process group."""

import subprocess
import sys
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tp.gated_weights import joined
from mindspeed_tp.grid.place import parts
from mindspeed_tp.partition import Partition
from mindspeed_tp.volume import LayerShape, one_dimensional, table

LARGE = LayerShape(tokens=1, hidden=16384, feed_forward=53248, gated=True, query=16384, key_value=1024)


def test_the_table_of_a_large_layer_on_sixteen_ranks():
    rounded = {(x, y): round(volume, 3) for x, y, volume in table(LARGE, 16)}
    assert rounded == {(16, 1): 3.75, (8, 2): 2.559, (4, 4): 3.076, (2, 8): 5.562, (1, 16): 11.257}
    assert one_dimensional(LARGE, 16) / LARGE.hidden == 3.75


def test_the_table_is_printed_for_a_launch():
    found = subprocess.run(
        [
            *(sys.executable, "-m", "mindspeed_core.cli.features", "tp-volume", "--hidden-size", "16384"),
            *("--ffn-hidden-size", "53248", "--key-value-width", "1024", "--ranks", "16"),
        ],
        capture_output=True,
        text=True,
    )
    assert "8       2       2.559" in found.stdout, found


@given(st.integers(1, 500), st.integers(1, 16))
def test_a_partition_covers_the_whole_in_order(total, ranks):
    cut = Partition.of(total, ranks)
    assert cut.total == total
    assert [cut.start(rank) for rank in range(ranks)] == [sum(cut.sizes[:rank]) for rank in range(ranks)]
    assert max(cut.sizes) - min(cut.sizes) <= 1
    assert cut.largest == -(-total // ranks)
    assert cut.even == (total % ranks == 0)


@given(st.integers(1, 8), st.integers(1, 8))
def test_groups_of_a_grid_meet_in_one_rank_each(x, y):
    along_x, along_y = parts(x, y)
    assert sorted(chain(*along_x)) == sorted(chain(*along_y)) == list(range(x * y))
    assert all(len(set(one) & set(other)) == 1 for one in along_x for other in along_y)


def test_old_gated_weights_are_joined_rank_by_rank():
    gate, up = torch.arange(8.0).view(4, 2), torch.arange(8.0, 16.0).view(4, 2)
    first, second = joined(gate, up, 2)
    assert torch.equal(first, torch.cat([gate[:2], up[:2]]))
    assert torch.equal(second, torch.cat([gate[2:], up[2:]]))
    with pytest.raises(ValueError, match="4 rows do not divide over 3 ranks"):
        joined(gate, up, 3)
