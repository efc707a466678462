"""Input that tells nothing, or something wrong: one sentence, before anything is run."""

import json
import shlex
from dataclasses import replace

import pytest
from click.testing import CliRunner
from synthetic_process import SyntheticProcess
from synthetic_ranks import every_stage

from mindspeed_core.registry import Registry
from mindspeed_tune.calibrate import Calibration, _judged, hardware_file
from mindspeed_tune.candidate import Candidate
from mindspeed_tune.command import program
from mindspeed_tune.extrapolate import whole
from mindspeed_tune.fit import Fit, MeasuredRun, fit
from mindspeed_tune.hardware import read_hardware
from mindspeed_tune.journal import Journal
from mindspeed_tune.launch_command import read_command
from mindspeed_tune.layout import Layout
from mindspeed_tune.measure import Measured, check_processors, ignored
from mindspeed_tune.report_pages import markdown, read_report
from mindspeed_tune.search import Search
from mindspeed_tune.search_report import report_of
from mindspeed_tune.space_file import Space
from mindspeed_tune.tuned_features import tune_features

MODEL = (
    "--mock-data --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 4096 "
    "--vocab-size 32000 --max-position-embeddings 4096 --position-embedding-type rope --normalization "
    "RMSNorm --swiglu --disable-bias-linear --bf16 --micro-batch-size 1 --global-batch-size 8 "
    "--train-iters 2 --lr 1e-3 --attention-dropout 0"
)
COMMAND = f"mindspeed-train --fake-world-size 2 {MODEL}"
SPACE = Space({"--micro-batch-size": (1,), "--recompute-granularity": (False,)})


@pytest.fixture(scope="module")
def start():
    return read_hardware("h100")


@pytest.fixture
def registry():
    return Registry.discover()


def known(name, layout, machine, seconds=None):
    records = every_stage(layout)
    run = MeasuredRun(name, records, [whole(record, stage) for stage, record in enumerate(records)], 1.0)
    return replace(run, seconds=seconds or run.predicted(machine))


def calibrated(start, runs, measured):
    return _judged(start, "bfloat16", fit(start, runs), runs, measured, [])


def file_of(found, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(hardware_file(found, ["mindspeed-train"]))
    return path


def invoke(*arguments):
    found = CliRunner().invoke(program, list(arguments))
    return found.exit_code, found.stderr


def test_a_calibration_whose_rounds_disagree_says_so_with_load_and_processors(start):
    runs = [known("data parallel", Layout(2), start)]
    noisy = Measured((runs[0].seconds, runs[0].seconds * 1.3, runs[0].seconds * 1.4), load=7.5)
    found = calibrated(start, runs, {"data parallel": noisy})
    assert not found.trusted
    assert "rounds of data parallel differ by 30% at a load of 7.5 on" in found.notes[0]
    assert "processors: rankings by these numbers are not to be trusted" in found.notes[0]


def test_a_calibration_that_cannot_rank_its_own_runs_says_so(start):
    layouts = {"a": Layout(1), "b": Layout(2, tp=2), "c": Layout(4, tp=4), "d": Layout(4, pp=4)}
    runs = [known(name, layout, start) for name, layout in layouts.items()]
    slowest_first = sorted(runs, key=lambda run: -run.seconds)
    times = sorted(run.seconds for run in runs)
    turned = [
        replace(run, seconds=time * 50**place) for place, (run, time) in enumerate(zip(slowest_first, times))
    ]
    found = calibrated(start, turned, {run.name: Measured((run.seconds,)) for run in turned})
    assert not found.trusted
    assert "the fitted numbers rank the runs by" in found.notes[0]


def test_a_search_by_such_a_calibration_promises_no_order(start, registry, tmp_path):
    runs = [known("data parallel", Layout(2), start), known("tensor parallel", Layout(2, tp=2), start)]
    noisy = Measured((1.0, 1.3, 1.4), load=7.5)
    path = file_of(calibrated(start, runs, {run.name: noisy for run in runs}), tmp_path)
    machine = replace(read_hardware(str(path)), memory=2.0**40)
    assert "not to be trusted" in machine.untrusted
    report = report_of(searched(registry, machine))
    assert "at a load of 7.5" in report["no_order_by_time"]
    assert "No ranking by time: the numbers of" in markdown(report)


def test_a_trusted_calibration_promises_one(start, tmp_path):
    runs = [known("data parallel", Layout(2), start), known("tensor parallel", Layout(2, tp=2), start)]
    quiet = {run.name: Measured((run.seconds, run.seconds * 1.01)) for run in runs}
    assert read_hardware(str(file_of(calibrated(start, runs, quiet), tmp_path))).untrusted == ""


def test_a_calibration_with_one_rank_is_refused_where_ranks_communicate(start, tmp_path):
    run = known("data parallel", Layout(1), start)
    found = Calibration(
        start, "bfloat16", Fit(start, {run.name: 0.0}, ()), {run.name: Measured((1.0,))}, (), True
    )
    path = file_of(found, tmp_path)
    code, told = invoke("search", "--tune-hardware", str(path), "--", *shlex.split(COMMAND))
    assert code == 1
    assert f"--tune-hardware {path}: was calibrated with one rank" in told
    assert "calibrate with two ranks or more" in told


def test_a_search_inside_a_running_training_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    code, told = invoke("search", "--tune-hardware", "h100", "--", *shlex.split(COMMAND))
    assert code == 1
    assert "a training runs in this process" in told


def test_folders_of_checkpoints_are_ignored_with_a_note():
    assert ignored(["--save", "there", "--load=here"]) == [
        "--load and --save: ignored; nothing is read or written there"
    ]
    assert ignored(["--num-layers", "2"]) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tune-budget-minutes", "0"], "--tune-budget-minutes"),
        (["--tune-trials", "0"], "--tune-trials"),
        (["--tune-refine", "long-runs"], "--tune-refine"),
        (["--tune-hardware", "nowhere.toml"], "nowhere.toml: cannot be read"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options, says):
    code, told = invoke("search", "--tune-hardware", "h100", *options, "--", *shlex.split(COMMAND))
    assert code != 0
    assert says in told


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no report", "is no report of a search"),
        (json.dumps({"format": 0}), "was written by another version"),
    ],
)
def test_a_file_that_is_no_report_is_neither_measured_nor_printed(tmp_path, text, says):
    path = tmp_path / "search.json"
    path.write_text(text)
    for command in ("measure", "report"):
        code, told = invoke(command, str(path))
        assert code == 1
        assert says in told
        assert str(path) in told


def test_more_processes_than_processors_are_refused_before_the_search():
    options = ["--tune-hardware", "h100", "--tune-refine", "short-runs"]
    code, told = invoke("search", *options, "--", *shlex.split(COMMAND.replace("size 2", "size 4096")))
    assert code == 1
    assert "4096 processes on" in told


@pytest.mark.parametrize("command", ["search", "calibrate"])
def test_ranks_of_several_nodes_are_not_timed_on_one(command, tmp_path):
    options = {
        "search": ["--tune-hardware", "h100", "--tune-refine", "short-runs"],
        "calibrate": ["--tune-out", str(tmp_path / "mine.toml")],
    }
    launch = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "-m", "mindspeed_core.train"]
    code, told = invoke(command, *options[command], "--", *launch, *shlex.split(MODEL))
    assert code == 1
    assert "2 ranks on nodes of 1: short runs start all of them on this machine" in told
    assert "--nnodes 1" in told
    assert not (tmp_path / "mine.toml").exists()


def test_a_report_of_several_nodes_is_not_measured_on_one(start, registry, tmp_path):
    report = report_of(searched(registry, start))
    report["command"] = shlex.split(f"torchrun --nnodes 2 --nproc-per-node 1 -m mindspeed_core.train {MODEL}")
    path = tmp_path / "search.json"
    path.write_text(json.dumps(report))
    code, told = invoke("measure", str(path))
    assert code == 1
    assert "2 ranks on nodes of 1" in told


def test_a_busy_machine_is_named_where_processes_are_timed(monkeypatch):
    monkeypatch.setattr("mindspeed_tune.threads.processors", lambda: 4)
    monkeypatch.setattr("os.getloadavg", lambda: (3.2, 0.0, 0.0))
    assert "the machine was busy: load 3.2 on 4 processors before 2 processes" in check_processors(2)
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.0, 0.0))
    assert check_processors(2) == ""


def searched(registry, machine):
    with Journal(None, {}) as journal:
        search = Search(
            read_command(shlex.split(COMMAND), {}),
            SPACE,
            machine,
            SyntheticProcess(),
            journal,
            registry,
            trials=4,
        )
        search.run()
    return search


def test_a_feature_without_fake_tensors_is_named_and_its_candidates_only_measured(
    start, registry, monkeypatch, tmp_path
):
    name = "fused-rmsnorm"
    monkeypatch.setattr(registry.features[name].cls, "fake_tensors", None)
    search = searched(registry, start)
    tried = tune_features(search)
    assert name not in {one.feature for one in tried}
    [note] = [note for note in search.notes if note.startswith(f"{name}: ")]
    assert "is only measured, with --tune-refine short-runs" in note
    [candidate] = search.only_measured
    assert candidate.settings["--use-fused-rmsnorm"] is True
    report = report_of(search, tried, {candidate.name: Measured((0.5, 0.6))})
    [row] = report["only_measured"]
    assert row["measured"] == 0.5
    assert "--use-fused-rmsnorm" in row["start"]
    assert "Measured alone" in markdown(report)
    path = tmp_path / "search.json"
    path.write_text(json.dumps(report))
    assert read_report(path)["only_measured"] == [row]


def test_the_command_as_it_is_may_be_a_candidate():
    assert Candidate().name == "the command as it is"
