"""mindspeed-profile in Megatron-LM's scripts: ranges, counts and times, without a change of a number."""

import gzip
import json

import fake_training as fake
import pytest

from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need

LOCAL = ("--platform", "cpu", "--log-interval", "1")
MEASURES = ("--log-comm-bytes", "--log-step-breakdown", "--op-cal-tflops", "--peak-tflops", "1")
TP2 = ("--tensor-model-parallel-size", "2")


def train_measured(folder):
    from mindspeed_profile.features import DECLARATIONS

    fake.adapt(*DECLARATIONS)
    trace = (
        *("--profile", "--profile-step-start", "1", "--profile-step-end", "2", "--profile-level", "level1"),
        *("--profile-with-cpu", "--profile-ranks", "0", "--profile-save-path", folder),
    )
    found = {"plain": fake.run_script(*LOCAL, *TP2)}
    fake.forget_run()
    found["measured"] = fake.run_script(*LOCAL, *TP2, *MEASURES, *trace)
    fake.forget_run()
    found["two profilers"] = fake.run_script(*LOCAL, *TP2, *trace, "--use-pytorch-profiler")
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    ranks = run_world(f"{__name__}:train_measured", 2, str(folder), timeout=200)
    # One of the ranks says what is wrong, whichever comes first.
    refused = [rank["two profilers"] for rank in ranks]
    return folder, {**ranks[0], "refused": refused}


def losses(run):
    return [line["lm loss"] for line in run["log"] if "lm loss" in line]


def test_measuring_changes_no_number(two):
    _, found = two
    assert losses(found["measured"]) == losses(found["plain"])


def test_reports_are_printed_below_the_steps(two):
    _, found = two
    out = found["measured"]["out"]
    assert "mindspeed: communication per step, of the rank with most:" in out
    assert "TENSOR_MODEL_PARALLEL_GROUP all_reduce:" in out
    assert "mindspeed: ms of a step, ranks with least and most:" in out
    assert "operations of the counted step" in out


def test_figures_join_the_log(two):
    _, found = two
    lines = [line for line in found["measured"]["log"] if "hfu" in line]
    assert lines
    assert lines[-1]["mfu"] > 0


def test_the_trace_names_what_megatron_core_times(two):
    folder, _ = two
    (path,) = folder.iterdir()
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert names.count("forward-compute") == names.count("backward-compute") > 0
    assert "step" in names


def test_two_profilers_are_refused(two):
    refused = two[1]["refused"]
    assert all(rank["status"] != 0 for rank in refused)
    said = "".join(rank["err"] for rank in refused)
    assert "--profile and --use-pytorch-profiler both own the profiler" in said
