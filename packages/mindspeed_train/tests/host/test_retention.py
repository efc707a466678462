"""``--save-retain-interval``: which checkpoint goes when a newer one is published."""

import pytest

from mindspeed_megatron.tracker import directory_name
from mindspeed_train.checkpoint import manifests, publish
from mindspeed_train.checkpoint.retention import Retention


@pytest.mark.parametrize(
    ("before", "step", "goes"),
    [(None, 1, False), (0, 1, False), (1, 2, True), (2, 3, False), (3, 3, False), (3, 2, True)],
)
def test_the_one_before_goes_unless_the_interval_divides_its_step(before, step, goes):
    assert Retention(interval=2).retires(before, step) is goes
    assert not Retention().retires(before, step)


def checkpoint(folder, step):
    directory = folder / directory_name(step)
    directory.mkdir()
    (directory / manifests.MANIFEST).write_text("{}")
    return directory


def test_a_link_and_what_is_no_checkpoint_stay(tmp_path):
    real = checkpoint(tmp_path, 1)
    (tmp_path / directory_name(2)).symlink_to(real)
    (tmp_path / directory_name(3)).mkdir()
    for step in (2, 3, 4):
        publish.delete_step(tmp_path, step)
    assert len(list(tmp_path.iterdir())) == 3
    publish.delete_step(tmp_path, 1)
    assert not real.exists()
