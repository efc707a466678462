"""Files of loads and the report on them."""

import json
import os
from dataclasses import replace

import pytest
from click.testing import CliRunner

from mindspeed_core.errors import UserError
from mindspeed_moe.load_log import LoadedModel, StepLoads, append_step, describe, read_log
from mindspeed_moe.load_picture import picture
from mindspeed_moe.load_report import report_on, unevenness
from mindspeed_moe.report_command import report
from mindspeed_testing.training import train_side

MODEL = LoadedModel(
    experts=4,
    ranks=2,
    node_size=1,
    choices=2,
    gathering_ranks=2,
    tokens=32,
    row_bytes=256,
    prob_bytes=4,
    reached=0,
    dispatcher="alltoall",
)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "loads.jsonl"
    describe(path, MODEL)
    append_step(path, StepLoads(1, {1: 20}, {1: [10, 4, 2, 2]}))
    append_step(path, StepLoads(2, {1: 20}, {1: [8, 8, 2, 2]}))
    return path


def test_a_file_has_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        describe(tmp_path / "loads.jsonl", MODEL)
    finally:
        os.umask(before)
    assert (tmp_path / "loads.jsonl").stat().st_mode & 0o777 == 0o640


def test_the_report_says_loads_drops_and_recommendations(log):
    found = report_on(read_log(log))
    (layer,) = found.layers
    assert layer.experts == [9, 6, 2, 2]
    assert layer.ranks == [15, 4]
    assert layer.dropped == pytest.approx(2 / 40)
    assert layer.unevenness.contiguous == pytest.approx(15 / 9.5)
    assert layer.unevenness.greedy == pytest.approx(11 / 9.5)
    assert found.dispatcher[0] == "alltoall"
    assert found.plan[0] == "dedup"
    assert found.placement[0] == "greedy"


def test_more_experts_of_a_token_than_ranks_are_gathered(tmp_path):
    describe(tmp_path / "l", replace(MODEL, choices=3))
    append_step(tmp_path / "l", StepLoads(1, {1: 3}, {1: [1, 1, 1, 0]}))
    assert report_on(read_log(tmp_path / "l")).dispatcher[0] == "allgather"


def test_copies_help_where_one_expert_has_most_of_the_load():
    found = unevenness([80.0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], 4)
    assert found.bound == pytest.approx(80 / (95 / 4))
    assert found.greedy >= found.bound
    assert found.copied[1] < 0.4 * found.greedy
    assert 8 not in found.copied


def test_even_loads_are_even_everywhere():
    found = unevenness([3.0] * 8, 2)
    assert (found.contiguous, found.greedy, found.bound) == (1, 1, 1)
    assert unevenness([0.0] * 8, 2).contiguous == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 3, "chosen": {"1": 2', "line 4: is damaged or cut off"),
        ('{"step": 3, "chosen": {"1": 2}, "loads": {"1": [1, 2]}}', "not 4 experts"),
        ('{"step": -1, "chosen": {"1": 2}, "loads": {"1": [1, 2, 3, 4]}}', "-1 is no count"),
        ("[1]", "line 4: is damaged or cut off"),
    ],
)
def test_a_damaged_line_is_named(log, line, message):
    with log.open("a") as file:
        file.write(line)
    with pytest.raises(UserError) as error:
        read_log(log)
    assert message in str(error.value)


def test_other_and_empty_files_are_refused(tmp_path):
    other = tmp_path / "other"
    other.write_text("{}\n")
    with pytest.raises(UserError, match="is no log of loads; name another file"):
        describe(other, MODEL)
    with pytest.raises(UserError, match="line 1"):
        read_log(other)
    with pytest.raises(UserError, match="name a file that can be written"):
        describe(tmp_path / "absent" / "loads", MODEL)
    describe(tmp_path / "short", MODEL)
    with pytest.raises(UserError, match="holds no loads"):
        read_log(tmp_path / "short")
    with pytest.raises(UserError, match="name a file that --moe-load-log wrote"):
        read_log(tmp_path / "absent")


def test_a_resumed_run_goes_on_and_its_steps_count(log):
    with log.open("a") as file:
        file.write('{"step": 3, "cho')
    describe(log, MODEL)
    append_step(log, StepLoads(2, {1: 20}, {1: [0, 0, 0, 20]}))
    found = read_log(log)
    assert [step.step for step in found.steps] == [1, 2]
    assert found.steps[1].loads[1] == [0, 0, 0, 20]


def test_the_command_prints_a_table_json_and_a_picture(log, tmp_path):
    printed = CliRunner().invoke(report, [str(log), "--picture", str(tmp_path / "loads.svg")])
    assert printed.exit_code == 0
    assert "recommended communication plan: dedup" in printed.output
    assert (tmp_path / "loads.svg").read_text().count("<rect") == 1 + 2 * 4
    given = json.loads(CliRunner().invoke(report, [str(log), "--json"]).output)
    assert given["layers"][0]["ranks"] == [15, 4]


def test_many_steps_are_drawn_in_few_columns(log):
    for step in range(3, 1000):
        append_step(log, StepLoads(step, {1: 20}, {1: [5, 5, 5, 5]}))
    assert picture(read_log(log)).count("<rect") == 1 + 200 * 4


def test_experts_that_are_filled_up_have_the_loads_and_drops_of_those_that_are_not(tmp_path):
    model = (
        "--num-layers 2 --hidden-size 32 --num-experts 4 --moe-ffn-hidden-size 32 --disable-bias-linear "
        "--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 0.75 --micro-batch-size 2"
    ).split()
    reports = []
    for name, flags in {"plain": (), "filled": ("--moe-pad-expert-input-to-capacity",)}.items():
        log = tmp_path / name
        train_side((*model, *flags, "--moe-load-log", str(log)), 1, 2, gradients=False, platform="cpu")
        reports.append(report_on(read_log(log)))
    plain, filled = reports
    assert all(layer.dropped > 0 for layer in plain.layers)
    assert filled.layers == plain.layers
