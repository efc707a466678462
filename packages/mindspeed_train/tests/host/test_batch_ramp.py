"""The growing batch, against the numbers of megatron-core's own rule."""

from __future__ import annotations

import pytest

from mindspeed_train.arguments.run_length import ramped_batch_size


@pytest.mark.parametrize(
    ("consumed", "size"),
    [(0, 8), (24, 8), (25, 16), (49, 16), (50, 24), (75, 32), (99, 32), (100, 40), (101, 40), (10**9, 40)],
)
def test_it_grows_in_steps_of_equal_length(consumed, size):
    assert ramped_batch_size(40, 8, 8, 100, consumed) == size


def test_it_never_passes_the_target():
    sizes = [ramped_batch_size(12, 4, 4, 7, consumed) for consumed in range(20)]

    assert sizes == sorted(sizes)
    assert set(sizes) == {4, 8, 12}
