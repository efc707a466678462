"""Throughput, parts of a step, stragglers, chart writers and the progress bar, each by what it shows."""

import contextlib
import io
import json
import os
import pty
import re
import sys
import threading
import types
from argparse import Namespace

import pytest
import torch

from mindspeed_core.errors import ArgumentError
from mindspeed_megatron.flops import FlopCount
from mindspeed_megatron.instruments.device_peak import measured_cpu_peak, named_peak
from mindspeed_testing import run_world
from mindspeed_train.monitoring.measures import detail_lines
from mindspeed_train.monitoring.run_log import RunLog, missing_engine_note
from mindspeed_train.monitoring.step_line import format_step
from mindspeed_train.monitoring.straggler import compare_ranks
from mindspeed_train.monitoring.throughput import Throughput
from mindspeed_train.monitoring.timing import StepTimers, merge_times, reported_times
from mindspeed_train.monitoring.writers import (
    Writers,
    check_writers,
    open_writers,
    scalars_of,
)

STEP = {
    "step": 4,
    "loss": 2.0,
    "learning_rate": 1e-3,
    "grad_norm": 0.5,
    "tokens_per_second": 100.0,
    "step_ms": 20.0,
    "peak_memory_bytes": 2**20,
    "memory_source": "process RSS",
}


def arguments(**changes):
    values = {
        "tensorboard_dir": None,
        "tensorboard_log_interval": 1,
        "tensorboard_queue_size": 7,
        "log_timers_to_tensorboard": False,
        "log_memory_to_tensorboard": False,
        "log_validation_ppl_to_tensorboard": False,
        "log_world_size_to_tensorboard": False,
        "wandb_project": None,
        "wandb_exp_name": None,
        "wandb_save_dir": None,
        "wandb_entity": None,
    }
    return Namespace(**{**values, **changes})


def test_throughput_is_operations_over_time_devices_and_peak():
    counted = Throughput(FlopCount({"mlp": 1e12}, recomputed=1e12), peak=6.0, source="")
    assert counted.figures(samples=8, seconds=2.0, devices=4) == {
        "tflops_per_device": 3.0,
        "hardware_tflops_per_device": 4.0,
        "share_of_peak": 0.5,
    }


def test_without_recompute_and_peak_there_is_one_figure():
    counted = Throughput(FlopCount({"mlp": 1e12}, recomputed=0.0), peak=None, source="")
    assert counted.figures(1, 1.0, 1) == {"tflops_per_device": 3.0}


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.0),
        ("NVIDIA H20", torch.float16, 148.0),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        ("NVIDIA L40S", torch.bfloat16, 362.0),
    ],
)
def test_a_known_device_has_its_vendors_peak(name, dtype, peak):
    assert named_peak(name, dtype)[0] == peak


def test_an_unknown_device_has_no_peak_and_says_what_to_give():
    peak, source = named_peak("Abacus 9", torch.bfloat16)
    assert peak is None
    assert "Abacus 9" in source
    assert "--peak-tflops" in source


def test_the_peak_of_a_cpu_is_measured():
    assert 1e-4 < measured_cpu_peak(torch.float32) < 1e3


def test_a_timer_counts_milliseconds_per_step_and_starts_again():
    timers = StepTimers(1)
    timers("part", log_level=1).set_elapsed(0.5)
    timers("inner", log_level=2).start()
    timers.steps = 2
    assert timers.take() == {"part": 250.0}
    assert timers.take() == {"part": 0.0}


@pytest.mark.parametrize(
    ("option", "expected"), [("max", 3.0), ("minmax", {"min": 1.0, "max": 3.0}), ("all", [1.0, 3.0])]
)
def test_times_of_ranks_are_shown_as_asked(option, expected):
    times = merge_times([{"send": 1.0}, {"send": 0.0}, {"send": 3.0}])
    assert reported_times(times, option) == {"send": expected}


def test_the_longest_part_is_the_first_line():
    lines = detail_lines({"timing_ms": {"short": {"min": 1.0, "max": 2.0}, "long": {"min": 0.5, "max": 9.0}}})
    assert [line.split() for line in lines[1:]] == [
        ["long", "0.50", "to", "9.00"],
        ["short", "1.00", "to", "2.00"],
    ]


def test_a_straggler_is_measured_against_its_own_stage():
    report = compare_ranks([(0, 10.0), (0, 10.0), (0, 15.0), (1, 40.0), (1, 40.0), (1, 44.0)], count=1)
    assert report["straggler_rank"] == 2
    assert report["straggler_ratio"] == pytest.approx(1.5)
    assert list(report["straggler_ranks"]) == ["2", "4"]
    assert "slowest: rank 2" in detail_lines(report)[0]


def test_of_two_ranks_the_faster_is_the_measure():
    assert compare_ranks([(0, 10.0), (0, 20.0)], count=1)["straggler_ratio"] == 2.0


def test_charts_have_megatron_lms_names():
    values = scalars_of({**STEP, "tflops_per_device": 3.0, "noise": 1.0, "skipped": True}, arguments())
    assert values == {
        "lm loss": 2.0,
        "learning-rate": 1e-3,
        "grad-norm": 0.5,
        "tokens-per-second": 100.0,
        "throughput": 3.0,
        "noise": 1.0,
        "iteration-time": 0.02,
    }


def test_times_memory_and_perplexity_are_sent_when_asked():
    wanted = arguments(
        log_timers_to_tensorboard=True, log_memory_to_tensorboard=True, log_validation_ppl_to_tensorboard=True
    )
    values = scalars_of({**STEP, "timing_ms": {"optimizer": {"min": 1.0, "max": 2.0}}}, wanted)
    assert values["optimizer-time"] == 0.002
    assert values["mem-peak-bytes"] == 2**20
    ppl = scalars_of({"step": 4, "validation_loss": 0.0}, wanted)
    assert ppl == {"lm loss validation": 0.0, "lm loss validation ppl": 1.0}


class Recorder:
    """Stands in for a chart program."""

    def __init__(self):
        self.seen, self.closed = [], False

    def scalars(self, step, values):
        self.seen.append((step, values))

    def close(self):
        self.closed = True


def test_writers_get_every_nth_record_and_are_closed(tmp_path):
    recorder = Recorder()
    writers = Writers(
        arguments(tensorboard_log_interval=2, log_world_size_to_tensorboard=True), [recorder], 8
    )
    watch = RunLog(tmp_path, total=9, start=0, progress=False, output=io.StringIO(), writers=writers)
    for step in (1, 2, 3, 4):
        watch.step({**STEP, "step": step})
    watch.validation(4, {"lm loss": 1.0})
    watch.close()
    assert [step for step, _ in recorder.seen] == [2, 4, 4]
    assert recorder.seen[0][1]["world-size"] == 8.0
    assert recorder.seen[2][1] == {"lm loss validation": 1.0}
    assert recorder.closed


def test_tensorboard_gets_the_folder_the_queue_and_the_scalars(monkeypatch, tmp_path):
    calls = []

    class SummaryWriter:
        def __init__(self, **options):
            calls.append(options)

        def add_scalar(self, *scalar):
            calls.append(scalar)

        def close(self):
            calls.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    writers = open_writers(arguments(tensorboard_dir=str(tmp_path)), active=True)
    writers.record({"step": 3, "loss": 1.5})
    writers.close()
    assert calls == [{"log_dir": str(tmp_path), "max_queue": 7}, ("lm loss", 1.5, 3), "closed"]


def test_weights_and_biases_gets_the_run_and_the_scalars(monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finished")
    )
    module = types.ModuleType("wandb")
    module.init = lambda **options: calls.append(options) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    args = arguments(wandb_project="p", wandb_exp_name="n", params_dtype=torch.float32)
    writers = open_writers(args, active=True)
    writers.record({"step": 3, "loss": 1.5})
    writers.close()
    assert (calls[0]["project"], calls[0]["name"]) == ("p", "n")
    json.dumps(calls[0]["config"])
    assert calls[1:] == [(3, {"lm loss": 1.5}), "finished"]


def test_other_ranks_open_no_writer(tmp_path):
    writers = open_writers(arguments(tensorboard_dir=str(tmp_path / "events")), active=False)
    writers.record(STEP)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "flag", "package"),
    [
        ({"tensorboard_dir": "events"}, "--tensorboard-dir", "tensorboard"),
        ({"wandb_project": "p", "wandb_exp_name": "n"}, "--wandb-project", "wandb"),
    ],
)
def test_a_missing_package_is_refused_by_flag_with_the_way_out(monkeypatch, changes, flag, package):
    monkeypatch.setattr("mindspeed_train.monitoring.writers.find_spec", lambda name: None)
    with pytest.raises(ArgumentError) as caught:
        check_writers(arguments(**changes))
    assert caught.value.flag == flag
    assert f"pip install {package}" in str(caught.value)


def test_a_project_without_a_name_is_refused(monkeypatch):
    monkeypatch.setattr("mindspeed_train.monitoring.writers.find_spec", lambda name: name)
    with pytest.raises(ArgumentError, match="--wandb-exp-name"):
        check_writers(arguments(wandb_project="p"))


def test_a_line_says_throughput_in_words():
    line = format_step(
        {**STEP, "tflops_per_device": 3.0, "hardware_tflops_per_device": 4.0, "share_of_peak": 0.5}, 9
    )
    assert "3 TFLOP/s per device (4 with recompute), 50.0% of peak" in line
    assert "tflops_per_device" not in line


def terminal_output(tmp_path, progress):
    """Return what a run shows on a terminal; read as it comes, since a terminal holds little."""
    controller, terminal = pty.openpty()
    shown = []
    reader = threading.Thread(target=read_all, args=(controller, shown))
    reader.start()
    with os.fdopen(terminal, "w") as output:
        watch = RunLog(tmp_path, total=4, start=0, progress=progress, output=output)
        watch.say("training from scratch")
        for step in (1, 2, 3, 4):
            watch.step({**STEP, "step": step})
        watch.close()
    reader.join()
    os.close(controller)
    return b"".join(shown).decode()


def read_all(controller, shown):
    # A closed terminal ends with an error on Linux and with nothing elsewhere.
    with contextlib.suppress(OSError):
        while part := os.read(controller, 4096):
            shown.append(part)


def test_a_terminal_has_a_bar_below_whole_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    shown = terminal_output(tmp_path, progress=True)
    assert "\x1b[" in shown
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).splitlines()]
    assert sum(line.startswith("step ") and line.endswith(" MiB") for line in lines) == 4
    assert any("━" in line and "4/4" in line for line in lines)


def test_a_terminal_without_progress_has_plain_lines(tmp_path):
    lines = terminal_output(tmp_path, progress=False).splitlines()
    assert lines[0] == "training from scratch"
    assert len(lines) == 5
    assert not any("\x1b" in line for line in lines)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A training on two ranks with everything measured; the second rank's batches come late."""
    folder = tmp_path_factory.mktemp("watched")
    run_world("monitored_run:train_monitored", 2, str(folder))
    return folder


def test_every_logged_step_has_throughput_parts_and_stragglers(watched):
    records = [json.loads(line) for line in (watched / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [2, 4]
    for record in steps:
        assert record["tflops_per_device"] > 0
        assert record["share_of_peak"] == pytest.approx(record["tflops_per_device"] / 2.0)
        assert {"forward-backward", "optimizer", "all-grads-sync", "batch-generator"} <= set(
            record["timing_ms"]
        )
        parts = record["timing_ms"]
        assert parts["forward-compute"]["max"] < parts["forward-backward"]["max"]


def test_the_late_rank_is_the_straggler(watched):
    records = [json.loads(line) for line in (watched / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert {record["straggler_rank"] for record in steps} == {1}
    assert all(record["straggler_ratio"] > 1.5 for record in steps)


def test_times_are_per_step_and_leave_validation_out(watched):
    records = [json.loads(line) for line in (watched / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if "loss" in record:
            assert record["timing_ms"]["forward-backward"]["max"] < 2 * record["step_ms"]


@pytest.mark.parametrize(
    ("kinds", "version", "told"),
    [({"cuda"}, "", True), ({"cuda"}, "2.1", False), ({"cpu"}, "", False), ({"npu"}, "", False)],
)
def test_a_missing_transformer_engine_is_one_note_where_it_would_be_used(kinds, version, told):
    assert bool(missing_engine_note(kinds, version)) == told
