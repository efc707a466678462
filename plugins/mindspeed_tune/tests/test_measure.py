"""Short runs: what fails is named, and the others go on."""

import json
import shlex

import pytest
from measured_worlds import faulty_candidates, noisy_candidates

from mindspeed_core.errors import UserError
from mindspeed_core.flags.flag_set import known_flags
from mindspeed_core.registry import Registry
from mindspeed_tune.candidate import PIPELINE, SEQUENCE, TENSOR, Candidate
from mindspeed_tune.journal import Journal
from mindspeed_tune.launch_command import read_command
from mindspeed_tune.measure import Measured, Measuring, check_processors, equal, ranked_by_time, undecided

COMMAND = (
    "mindspeed-train --nproc 2 --mock-data --num-layers 2 --hidden-size 32 --num-attention-heads 2 "
    "--seq-length 32 --vocab-size 64 --position-embedding-type rope --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 9 --lr 1e-3 --attention-dropout 0 "
    "--save nowhere --load nowhere --log-interval 1"
)


@pytest.fixture(scope="module")
def flags():
    return known_flags(Registry.discover())


def measuring(flags, journal, **options):
    command = read_command(shlex.split(COMMAND), {})
    return Measuring(command, flags, journal, platform="cpu", **{"limit": 120.0, **options})


def seeds(*numbers):
    return [Candidate({"--seed": number}) for number in numbers]


def test_what_dies_hangs_or_runs_out_of_memory_is_named_and_the_others_are_measured(flags):
    with Journal(None, {}) as journal:
        runs = measuring(flags, journal, train=faulty_candidates, limit=5.0)
        found = runs.measure(seeds(1, 13, 2, 14, 3, 15), rounds=2)
    assert {name: one.failure for name, one in found.items() if one.failure} == {
        "--seed 13": "rank 0: exited with status 9 without a result",
        "--seed 14": "hangs: no result after 5 s",
        "--seed 15": "rank 0: MemoryError: out of memory: tried to allocate 80 GiB",
    }
    assert found["--seed 2"].seconds == pytest.approx((0.2, 0.2))
    assert ranked_by_time(found) == (["--seed 1", "--seed 2", "--seed 3"], "")


def test_halving_measures_the_better_ones_more_often(flags):
    with Journal(None, {}) as journal:
        found = measuring(flags, journal, train=faulty_candidates).halve(seeds(1, 2, 3, 4))
    assert [len(found[f"--seed {number}"].seconds) for number in (1, 2, 3, 4)] == [3, 3, 1, 1]


def test_candidates_that_rounds_do_not_tell_apart_get_more_of_them(flags):
    with Journal(None, {}) as journal:
        found = measuring(flags, journal, train=noisy_candidates).settle(seeds(1, 2, 9))
    # The third round of the first two comes near their shortest step; the last one is far from both.
    assert [len(found[f"--seed {number}"].seconds) for number in (1, 2, 9)] == [4, 4, 3]


def test_what_was_measured_is_not_measured_again(flags, tmp_path):
    for _ in range(2):
        with Journal(tmp_path, {}) as journal:
            measuring(flags, journal, train=faulty_candidates).measure(seeds(1), rounds=2)
    # The head, and two rounds.
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 3


def test_what_a_world_had_measured_when_everything_was_killed_is_taken_over(flags, tmp_path):
    with Journal(tmp_path, {}) as journal:
        runs = measuring(flags, journal, train=faulty_candidates)
        line = {"kind": "end", "name": runs._key(0, seeds(1)[0]), "times": [7.0], "peak": None, "load": 0.5}
        (tmp_path / "running.jsonl").write_text(json.dumps(line) + "\n" + '{"kind": "beg')
        found = runs.measure(seeds(1), rounds=1)
    assert found["--seed 1"].seconds == (7.0,)


def test_layouts_train_one_after_the_other_in_one_world_and_write_nothing(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layouts = [Candidate({}), Candidate({TENSOR: 2, SEQUENCE: True}), Candidate({PIPELINE: 2})]
    with Journal(None, {}) as journal:
        found = measuring(flags, journal).measure(layouts, rounds=1, memory=True)
    assert [one.failure for one in found.values()] == ["", "", ""]
    assert all(one.best > 0 for one in found.values())
    whole, *parts = (one.peak for one in found.values())
    assert all(part < whole for part in parts)
    assert list(tmp_path.iterdir()) == []


def test_a_script_is_not_measured(flags):
    with Journal(None, {}) as journal:
        runs = Measuring(read_command(["python", "pretrain_gpt.py"], {}), flags, journal)
        with pytest.raises(UserError, match=r"pretrain_gpt\.py: short runs are those of mindspeed-train"):
            runs.measure(seeds(1))


def test_more_processes_than_processors_are_not_timed():
    with pytest.raises(UserError, match="100000 processes on"):
        check_processors(100000)


def test_times_that_differ_between_rounds_tell_no_order():
    found = {"a": Measured((1.0, 1.5, 1.9)), "b": Measured((1.1, 1.6, 2.0)), "c": Measured(failure="dies")}
    order, why = ranked_by_time(found)
    assert order == ["a", "b"]
    assert "differ by up to 90%" in why


def test_neighbours_that_are_apart_or_surely_equal_need_no_further_round():
    sure = {"a": Measured((1.0, 1.01, 1.3)), "b": Measured((1.005, 1.01, 1.2)), "c": Measured(failure="dies")}
    assert undecided(sure) == set()
    # Both of them get the further rounds: the machine may be faster in these.
    assert undecided({**sure, "d": Measured((1.01, 1.09, 1.1))}) == {"b", "d"}
    assert undecided({**sure, "d": Measured((1.5, 1.9, 1.9))}) == set()


def test_layouts_closer_than_their_own_rounds_are_equal():
    assert equal(Measured((1.0, 1.06, 1.07)), Measured((1.04, 1.05, 1.05)))
    assert not equal(Measured((1.0, 1.01, 1.01)), Measured((1.2, 1.21, 1.21)))
