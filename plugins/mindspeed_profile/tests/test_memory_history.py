"""A history of allocations is written whatever becomes of the run, and figures are those of all ranks."""

import pickle
import pickletools

import pytest

from mindspeed_core.activation import prepare
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_core.runtime.metrics import Metrics
from mindspeed_profile.features import DECLARATIONS
from mindspeed_profile.memory_figures import record_figures
from mindspeed_profile.memory_history import PAUSE_SECONDS, MemoryHistoryFile, history_path
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags


class Platform:
    """Counts what it is asked."""

    def __init__(self, fails=False):
        self.recording, self.snapshots, self.fails = [], [], fails

    def record_memory(self, entries=100_000):
        self.recording.append(entries)

    def memory_snapshot(self, path):
        if self.fails:
            raise OSError(28, "No space left on device")
        self.snapshots.append(path)


def test_each_rank_has_a_file_of_its_own():
    assert str(history_path("runs/snapshot.pickle", 3)) == "runs/snapshot_3.pickle"


def test_it_records_from_its_making_until_it_is_closed(tmp_path):
    platform = Platform()
    history = MemoryHistoryFile(platform, str(tmp_path / "s.pickle"), 0)
    history.close()
    assert platform.recording == [100_000, 0]
    assert platform.snapshots == [tmp_path / "s_0.pickle"]


def test_it_is_written_now_and_then_but_not_at_every_step(tmp_path):
    platform = Platform()
    history = MemoryHistoryFile(platform, str(tmp_path / "s.pickle"), 0)
    history.write_now_and_then()
    assert platform.snapshots == []
    history._written -= PAUSE_SECONDS
    history.write_now_and_then()
    history.write_now_and_then()
    assert len(platform.snapshots) == 1


def test_a_full_disk_is_a_warning(tmp_path, caplog):
    history = MemoryHistoryFile(Platform(fails=True), str(tmp_path / "s.pickle"), 0)
    history.close()
    assert "--memory-snapshot-path" in caplog.text
    assert "No space left on device" in caplog.text


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("history")
    return folder, run_world("test_memory_history:train_recorded", 2, str(folder / "s.pickle"))


def train_recorded(path):
    from profiled_run import train_once

    flags = ("--record-memory-history", "--memory-snapshot-path", path, "--profile-ranks", "1")
    return train_once((*flags, "--log-memory-interval", "2", "--log-device-memory-used"), 4)["numbers"]


def test_only_the_chosen_rank_writes_a_history_with_stacks(two):
    folder, _ = two
    (path,) = folder.iterdir()
    assert path.name == "s_1.pickle"
    data = path.read_bytes()
    assert any(operation.name == "STOP" for operation, *_ in pickletools.genops(data))
    events = pickle.loads(data)["device_traces"][0]
    assert any(frame["name"] == "forward" for event in events for frame in event["frames"])


def test_figures_come_with_the_interval_and_are_of_all_ranks(two):
    _, ranks = two
    assert [("memory_allocated_bytes" in step) for step in ranks[0]] == [False, True, False, True]
    last = ranks[0][-1]
    assert last["memory_allocated_bytes"] >= last["memory_allocated_bytes_least"] > 0
    assert last["memory_max_allocated_bytes"] > 0
    assert last["device_memory_used_bytes"] > 0
    assert ranks[0][-1]["memory_allocated_bytes"] == ranks[1][-1]["memory_allocated_bytes"]


class Figures(Platform):
    """Tells figures."""

    class _Figure:
        bytes = 7

    def memory_allocated(self):
        return self._Figure

    peak_memory = memory_used = memory_allocated


def test_the_memory_of_the_device_is_asked_for_on_request_alone():
    metrics = Metrics()
    record_figures(Figures(), metrics, device=False)
    assert "device_memory_used_bytes" not in metrics.names()
    record_figures(Figures(), metrics, device=True)
    assert "device_memory_used_bytes" in metrics.names()


def plan(*flags):
    registry = Registry.of(DECLARATIONS, "mindspeed-profile")
    return prepare(training_flags(flags, 1), platform="cpu", registry=registry, host="standalone").plan


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--log-memory-interval", "0"], "--log-memory-interval 0: a number of steps is 1 or above"),
        (["--log-memory-interval", "3", "--log-interval", "2"], "must be a multiple of --log-interval 2"),
        (["--record-memory-history", "--memory-snapshot-path", "folder/"], "names no file"),
        (["--record-memory-history", "--profile-ranks", "-3"], "a rank is 0 or above"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags, message):
    with pytest.raises(PlanError, match=message):
        plan(*flags)


def test_the_path_alone_records_nothing():
    assert plan("--memory-snapshot-path", "here.pickle").names == ()
