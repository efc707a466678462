"""Measurements of mindspeed-profile in a loop of one's own: the same numbers as in the standalone host."""

import pytest
from own_loop import both

from mindspeed_testing import run_world

TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
MEASURES = (
    *("--log-comm-bytes", "--log-step-breakdown", "--op-cal-tflops", "--peak-tflops", "1"),
    *("--log-memory-interval", "1"),
)


def measured(folder):
    trace = (
        *("--profile", "--profile-step-start", "1", "--profile-step-end", "2", "--profile-level", "level1"),
        *("--profile-with-cpu", "--profile-ranks", "0", "--profile-save-path", folder),
    )
    return both(TP2, (*MEASURES, *trace))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    return folder, run_world("test_measurements:measured", 2, str(folder))[0]


def test_the_losses_are_those_of_the_standalone_host(two):
    _, (standalone, own, *_) = two
    assert own == standalone


def test_communication_and_operations_are_counted_alike(two):
    _, (_, _, standalone, own, _) = two
    tensor = "TENSOR_MODEL_PARALLEL_GROUP"
    assert own[-1]["communication"][tensor] == standalone[-1]["communication"][tensor]
    counted = [step["operations"] for step in own if "operations" in step]
    assert counted == [step["operations"] for step in standalone if "operations" in step]
    assert counted[0]["samples"] == 4
    assert own[-1]["hfu"] > 0
    assert own[-1]["mfu"] > 0


def test_a_step_is_divided_by_timers_and_waits(two):
    _, (_, _, standalone, own, _) = two
    for numbers in (standalone[-1], own[-1]):
        assert {"compute", "data", "gradients", "optimizer"} <= set(numbers["step_breakdown_ms"])
        assert numbers["memory_allocated_bytes"] > 0


def test_the_trace_names_the_passes_in_both_hosts(two):
    import gzip
    import json

    folder, _ = two
    paths = sorted(folder.iterdir())
    assert len(paths) == 2
    for path in paths:
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert names.count("forward-compute") == names.count("backward-compute") == 4
        assert "all-grads-sync" in names
        assert "optimizer-inner-step" in names
