"""Numbers fitted to runs whose machine is known."""

from dataclasses import replace

import pytest
from synthetic_ranks import every_stage

from mindspeed_tune.calibrate import Calibration, hardware_file
from mindspeed_tune.extrapolate import whole
from mindspeed_tune.fit import MeasuredRun, fit
from mindspeed_tune.hardware import read_hardware
from mindspeed_tune.layout import Layout
from mindspeed_tune.measure import Measured
from mindspeed_tune.search_report import rank_correlation


@pytest.fixture(scope="module")
def start():
    return read_hardware("h100")


def known(name, layout, machine, **options):
    """Return a run as a machine would measure it."""
    records = every_stage(layout, **options)
    wholes = [whole(record, stage) for stage, record in enumerate(records)]
    run = MeasuredRun(name, records, wholes, 1.0)
    return replace(run, seconds=run.predicted(machine))


def runs_of(machine):
    return [known("data parallel", Layout(2), machine), known("tensor parallel", Layout(2, tp=2), machine)]


@pytest.fixture(scope="module")
def machine(start):
    """A machine whose collectives are late, and whose products are slow."""
    slow = {name: value / 7 for name, value in start.flops.items()}
    return replace(start, flops=slow, latency_within_node=start.latency_within_node * 12)


def test_two_runs_tell_the_numbers_that_decide_others(start, machine):
    found = fit(start, runs_of(machine))
    assert all(abs(error) < 0.02 for error in found.errors.values())
    others = [
        known("pipeline", Layout(4, pp=2, tp=2), machine),
        known("tp 4", Layout(4, tp=4), machine),
        known("few", Layout(4, pp=4), machine, microbatches=4),
    ]
    for run in others:
        assert run.predicted(found.hardware) == pytest.approx(run.seconds, rel=0.1)
        # The shipped numbers are far from it.
        assert run.predicted(start) < run.seconds / 2


def test_what_no_run_constrains_stays_where_it_began_and_is_named(start, machine):
    found = fit(start, [known("data parallel", Layout(1), machine)])
    assert "latency_within_node" in found.unconstrained
    assert found.hardware.latency_within_node == pytest.approx(start.latency_within_node, rel=0.01)
    assert "flops" not in found.unconstrained


def test_a_calibration_is_a_hardware_file_that_says_by_which_runs(start, machine, tmp_path):
    measured = {"collectives": {"all_gather": 0.5, "reduce_scatter": 0.25}, "update_bandwidth": 9e11}
    start, machine = (replace(one, **measured) for one in (start, machine))
    known_runs = runs_of(machine)
    found = fit(start, known_runs)
    runs = {run.name: Measured((run.seconds, run.seconds * 1.04), load=1.5) for run in known_runs}
    text = hardware_file(
        Calibration(start, "bfloat16", found, runs, ("the machine was busy",), False), ["mindspeed-train"]
    )
    path = tmp_path / "mine.toml"
    path.write_text(text)
    read = read_hardware(str(path))
    assert read.flops["bfloat16"] == pytest.approx(found.hardware.flops["bfloat16"], rel=1e-3)
    assert {"collectives": read.collectives, "update_bandwidth": read.update_bandwidth} == measured
    assert read.sources["collectives.all_gather"] == "a microbenchmark in a loop"
    assert read.latency_within_node == pytest.approx(found.hardware.latency_within_node, rel=1e-3)
    assert "tensor parallel" in read.sources["device.bf16"]
    assert "spread 4%, load 1.5" in read.sources["device.bf16"]
    assert "device.fp32" in read.unverified
    assert read.sources["device.fp32"] == "assumed: the runs compute in bfloat16"
    assert "links.between_nodes" in read.unverified
    assert text.splitlines()[1] == "# the machine was busy"


def test_rank_correlation_is_spearmans():
    assert rank_correlation([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1.0)
    assert rank_correlation([(1, 30), (2, 20), (3, 10)]) == pytest.approx(-1.0)
    assert rank_correlation([(1, 10), (1, 20), (3, 30), (4, 40)]) == pytest.approx(0.9487, abs=1e-3)
    assert rank_correlation([(1, 10), (2, 20)]) is None
