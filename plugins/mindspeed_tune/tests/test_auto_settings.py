"""MindSpeed's flags of automatic tuning: what they search for, and what they refuse."""

import sys

import pytest

from mindspeed_core import PlanError, prepare
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.registry import Registry
from mindspeed_tune import auto_settings

TRAINING = (
    "--mock-data --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size 64 "
    "--position-embedding-type rope --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3"
).split()
SEARCHING = "--auto-settings --nnodes 2 --nproc-per-node 4 --tune-hardware h100".split()


@pytest.fixture(scope="module")
def registry():
    return Registry.discover()


def refused(registry, *flags):
    with pytest.raises(PlanError) as problem:
        prepare([*TRAINING, *flags], host=DEFAULT_HOST, platform="cpu", registry=registry)
    return str(problem.value)


def row(seconds):
    return {
        "settings": {"--tensor-model-parallel-size": 2, "--micro-batch-size": 1},
        "seconds": seconds,
        "needed": 2.0**30,
        "start": "torchrun --nnodes 2 --nproc-per-node 4 -m mindspeed_core.train --num-layers 2",
    }


@pytest.fixture
def asked(monkeypatch):
    """Let searches answer at once, and keep what they are asked."""
    found = []

    def search_layouts(words, options, say):
        found.append((list(words), options))
        return {"top": [row(0.1 * place) for place in range(1, 6)], "start": row(0.1)["start"]}

    monkeypatch.setattr(auto_settings, "search_layouts", search_layouts)
    monkeypatch.setattr("mindspeed_tune.report_pages.write_reports", lambda report, folder: None)
    return found


def ended(registry, monkeypatch, *flags):
    arguments = [*TRAINING, *SEARCHING, *flags]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    session = prepare(arguments, host=DEFAULT_HOST, platform="cpu", registry=registry)
    with pytest.raises(SystemExit) as end:
        session.open()
    return end.value.code


@pytest.mark.parametrize(
    ("spelling", "folder"),
    [
        ("--auto-settings", "--auto-settings-work-dir"),
        ("--auto-tuning", "--auto-tuning-work-dir"),
        ("--auto-parallel", "--auto-settings-work-dir"),
    ],
)
def test_the_program_searches_for_its_own_command_and_ends(
    registry, monkeypatch, asked, capsys, spelling, folder, tmp_path
):
    monkeypatch.setattr(f"{__name__}.SEARCHING", [spelling, *SEARCHING[1:]])
    assert ended(registry, monkeypatch, folder, str(tmp_path), "--tune-trials", "5") == 0
    [(words, options)] = asked
    launcher = "torchrun --nnodes 2 --nproc-per-node 4 -m mindspeed_core.train".split()
    assert words == [*launcher, *TRAINING]
    assert (options.hardware, options.trials, options.work_dir) == ("h100", 5, tmp_path)
    said = capsys.readouterr().out
    assert said.count("Top ") == 3
    assert "Top 1: tensor_model_parallel_size: 2, micro_batch_size: 1, expected step 100.0 ms" in said


def test_the_nodes_to_search_for_may_be_others(registry, monkeypatch, asked):
    ended(registry, monkeypatch, "--target-nnodes", "16")
    assert asked[0][0][:3] == ["torchrun", "--nnodes", "16"]


def test_another_node_leaves_the_search_to_the_first(registry, monkeypatch, asked, capsys):
    assert ended(registry, monkeypatch, "--node-rank", "1") == 0
    assert asked == []
    assert "node 0 searches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--auto-settings"], "--tune-hardware is missing"),
        (["--nproc-per-node", "8"], "--nproc-per-node: belong to the launcher; give them to torchrun"),
        (["--tune-trials", "8"], "--tune-trials: belong to a search; add --auto-settings"),
        ([*SEARCHING, "--target-nnodes", "0"], "--target-nnodes must be 1 or more"),
        ([*SEARCHING, "--auto-settings-launch"], "starts the ranks of one node"),
        (["--auto-parallel-mm"], "multimodal models are not here"),
        (["--auto-parallel-profile"], "switches of the search's own measuring runs"),
    ],
)
def test_what_cannot_be_searched_for_is_refused(registry, flags, says):
    assert says in refused(registry, *flags)


def test_under_torchrun_one_sentence_says_how_to_start_it(registry, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert "is started by python" in refused(registry, *SEARCHING)


def test_flags_of_profiling_runs_are_said_to_have_no_effect(registry):
    flags = [*TRAINING, *SEARCHING, "--auto-settings-ranks", "16", "--auto-settings-type", "black"]
    session = prepare(flags, host=DEFAULT_HOST, platform="cpu", registry=registry)
    assert {one.flag for one in session.plan.unread} >= {"--auto-settings-ranks", "--auto-settings-type"}
