"""A killed worker costs time and nothing else: each resume repeats the undisturbed run bit for bit."""

import pytest

from mindspeed_testing.faults import records, run_undisturbed
from mindspeed_testing.kills import kill_repeatedly

FLAGS = (
    "--platform cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --num-workers 0 --lr 1e-3 "
    "--lr-decay-style constant --train-iters 20000 --eval-iters 0 "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --use-distributed-optimizer"
).split()
SAVING = ["--save-interval", "3", "--keep-last-n", "2"]
CASES = {"foreground": ([], 10, 1), "background": (["--async-save"], 10, 2)}


@pytest.fixture(scope="module", params=[pytest.param("foreground", marks=pytest.mark.thorough), "background"])
def killed(request, tmp_path_factory):
    """A job with ten killed workers, and the undisturbed one."""
    flags, kills, seed = CASES[request.param]
    root = tmp_path_factory.mktemp(request.param)
    report = kill_repeatedly([*FLAGS, *SAVING, *flags], root / "killed", processes=2, kills=kills, seed=seed)
    undisturbed = run_undisturbed(FLAGS, root / "undisturbed", processes=2, steps=report.last)
    return root, report, undisturbed


def test_every_resume_repeats_the_undisturbed_run(killed):
    root, report, undisturbed = killed
    assert report.kills == 10
    assert len(report.starts) > 3
    assert report.contradictions == []
    assert {step: undisturbed.get(step) for step in report.printed if step <= report.last} == {
        step: values for step, values in report.printed.items() if step <= report.last
    }
    # The file holds exact numbers, of the attempt that got through.
    exact = records(root / "undisturbed" / "run")
    assert {
        step: value for step, value in records(root / "killed" / "run").items() if step <= report.last
    } == exact


def test_nothing_published_is_lost(killed):
    _, report, _ = killed
    assert report.lost == []
    assert report.starts == sorted(report.starts)


def test_no_unfinished_checkpoint_is_left(killed):
    _, report, _ = killed
    assert report.leftovers == []
    assert report.orphans == []


def test_a_killed_supervisor_takes_all_it_started_with_it(tmp_path):
    flags = [*FLAGS, *SAVING, "--async-save"]
    report = kill_repeatedly(flags, tmp_path, processes=2, kills=3, seed=3, victims=("supervisor",))
    assert report.commands == 4
    assert report.lost == []
    assert report.contradictions == []
    assert report.leftovers == []
    assert report.orphans == []
