"""Whatever is typed is answered: with a plan, or with the flag, its value and the way out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import shrunk, tokens
from explained import complaint

from mindspeed_core import SessionError, check
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import Problem

HERE = Path(__file__).parent


def answers(first, last, seed, folder, program="checked_commands.py"):
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(HERE / program),
        str(first),
        str(last),
        str(seed),
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=3000)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def told(wrong):
    return "\n\n".join(f"line {each['index']}: {each['line']}\n{each['found']}" for each in wrong[:40])


def test_command_lines_are_answered(tmp_path):
    result = answers(0, 400, 14, tmp_path)
    assert not result["wrong"], told(result["wrong"])
    # A generator whose lines all fail in the parser, or all pass, would prove nothing.
    assert result["accepted"] > 20
    assert result["refused"] > 200


@pytest.mark.thorough
def test_ten_thousand_command_lines_are_answered(tmp_path):
    result = answers(0, 10_000, 1, tmp_path)
    assert not result["wrong"], told(result["wrong"])
    assert result["accepted"] > 500


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(2, 8))
def test_trainings_that_pass_validation_train_or_say_why_not(tmp_path, seed):
    result = answers(0, 50, seed, tmp_path, "trained_lines.py")
    assert not result["wrong"], told(result["wrong"])


def test_a_failing_line_is_cut_to_what_fails():
    line = (("--a", "1"), ("--b", "xxxxxxxx"), ("--c",), ("--d", "2", "3"))
    small = shrunk(line, lambda part: "--d" in tokens(part) and any("x" in word for word in tokens(part)))
    assert small == (("--b", "x"), ("--d", "2", "3"))


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (Problem("E", "is wrong", "mend it", flag="--lr", value="5"), ""),
        (Problem("E", "5: is wrong", "mend it", flag="--lr"), ""),
        (Problem("E", "is required", "give it", flag="--seed"), ""),
        (Problem("E", "is wrong", "", flag="--lr", value="5"), "no way out"),
        (Problem("E", "is wrong", "mend it", flag="--lr"), "no value"),
        (Problem("E", "is wrong", "mend it"), "no flag"),
        (Problem("E", "is wrong", "mend it", flag="model flags"), "neither given nor known"),
    ],
)
def test_the_check_of_refusals_sees_what_is_missing(problem, said):
    found = complaint(problem, ["--lr", "5"], flag_set(Registry.of(())))
    assert said in found
    assert bool(said) == bool(found)


def test_checking_opens_no_session_and_leaves_the_flags_alone():
    from mindspeed_core import session

    flags = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4, "platform": "cpu"}
    more = {"micro_batch_size": 1, "vocab_size": 8, "mock_data": True, "train_iters": 1, "lr": 0.1}
    given = {**flags, **more, "tensor_model_parallel_size": 2}
    found = check(given, world_size=4)
    assert found.ok
    assert (found.args.data_parallel_size, found.args.world_size) == (2, 4)
    assert session._open is None
    assert given == {**flags, **more, "tensor_model_parallel_size": 2}
    (problem,) = check(given, world_size=3).problems
    assert (problem.flag, problem.value) == ("--tensor-model-parallel-size", "2")
    assert check(flags, world_size=2, host="library").args.world_size == 2


def test_checking_works_while_a_session_is_open():
    from mindspeed_core import activate

    with activate({"platform": "cpu"}) as session:
        assert check({"hidden_size": 8, "platform": "cpu"}).problems[0].flag == "--num-layers"
        assert session.is_open


def test_flags_of_megatron_lms_scripts_are_not_checked_here():
    with pytest.raises(SessionError, match="no training of Megatron-LM is running"):
        check({"platform": "cpu"}, host="megatron-lm")
