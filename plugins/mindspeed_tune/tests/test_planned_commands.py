"""Commands that are planned for real: every rank runs in a process of its own, on shapes."""

import json
import os

import pytest
from click.testing import CliRunner

from mindspeed_core.cli.features import program as features
from mindspeed_core.errors import UserError
from mindspeed_tune.command import program
from mindspeed_tune.driver import Ranks, records_of
from mindspeed_tune.extrapolate import whole
from mindspeed_tune.launch_command import read_command
from mindspeed_tune.launch_plan import make_plan

MODEL = (
    "--mock-data --num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 256 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --bf16 "
    "--use-distributed-optimizer --micro-batch-size 2 --train-iters 2 --lr 1e-3"
)
LAYOUT = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
COMMAND = f"mindspeed-train --fake-world-size 8 {MODEL} {LAYOUT} --global-batch-size 16"


@pytest.fixture(scope="module")
def records():
    with Ranks(read_command(COMMAND.split(), {})) as runner:
        return records_of(runner)


def test_every_kind_is_run_and_every_kind_of_call_has_a_partner(records):
    plan = make_plan(("train",), records)
    assert [kind.kind.name for kind in plan.kinds] == ["stage 0", "stage 1"]
    assert plan.order.differences == ()
    assert plan.order.unchecked == ()
    assert plan.ok


def test_closed_forms_are_what_was_counted(records):
    forms = [form for kind in make_plan(("train",), records).kinds for form in kind.forms]
    assert {form.expected.operation for form in forms} >= {"isend", "irecv", "reduce_scatter_tensor"}
    assert [form.difference for form in forms] == [0.0] * len(forms)


def test_the_schedule_that_ran_is_the_one_of_the_timeline(records):
    from mindspeed_tune.schedules import order

    for record in records:
        first = record.runs[0]
        assert list(first.steps) == order(record.layout, record.stage, first.microbatches)


def test_a_rank_costs_little(records):
    assert all(record.cost["peak_bytes"] < 2**30 for record in records)


@pytest.mark.thorough
def test_extrapolated_bytes_and_traffic_are_those_of_the_whole_step(records):
    command = read_command(COMMAND.split(), {})
    with Ranks(command, exact_layers=True, exact_microbatches=True) as runner:
        exact = {record.rank: record for record in runner.run([0, 4])}
    for record in records:
        if record.rank in exact:
            one, other = whole(record), whole(exact[record.rank])
            assert sum(one.peak.values()) == pytest.approx(sum(other.peak.values()), rel=0.005)
            for key, counted in other.traffic.items():
                assert one.traffic[key] == pytest.approx(counted, rel=0.005)


@pytest.mark.thorough
def test_a_plan_writes_its_reports_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(
        program,
        [
            "plan",
            "--plan-out",
            "reports",
            "--plan-ranks",
            "0",
            "--json",
            "--",
            *COMMAND.split(),
            "--save",
            "kept",
        ],
    )
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["ranks_run"] == [0]
    assert sorted(os.listdir(tmp_path)) == ["reports"]
    assert sorted(os.listdir("reports")) == ["plan.html", "plan.json", "plan.md", "schedule.json"]


@pytest.mark.thorough
def test_a_world_that_no_layout_divides_is_one_sentence():
    command = read_command(COMMAND.replace("size 8", "size 6", 1).split(), {})
    with Ranks(command) as runner, pytest.raises(UserError, match="6") as caught:
        records_of(runner)
    assert "\n" not in str(caught.value)


def test_the_command_is_one_of_mindspeed_features_too():
    found = CliRunner().invoke(features, ["plan-scale", "--", "bash", "run.sh"])
    assert found.exit_code == 1
    assert "a shell script hides its command" in found.output


DENSE = MODEL.replace("--num-layers 6", "--num-layers 2")
CONTEXT = "--context-parallel-size 4 --context-parallel-algo kvallgather_cp_algo --global-batch-size 16"
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 4 "
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
    "--global-batch-size 16"
)


@pytest.mark.parametrize(
    ("flags", "group", "forms"),
    [
        (f"{CONTEXT} --use-flash-attn --pre-tockens 20", "CONTEXT_PARALLEL_GROUP", 2),
        pytest.param(EXPERTS, "EXPERT_", 4, marks=pytest.mark.thorough),
    ],
    ids=["context", "experts"],
)
def test_closed_forms_of_split_sequences_and_experts_are_what_was_counted(flags, group, forms):
    with Ranks(read_command(f"mindspeed-train --fake-world-size 8 {DENSE} {flags}".split(), {})) as runner:
        [record] = runner.run([5])
    found = [form for kind in make_plan(("train",), [record]).kinds for form in kind.forms]
    assert [form.difference for form in found] == [0.0] * len(found)
    assert sum(group in form.expected.group for form in found) == forms


def test_contradictory_variables_are_one_sentence():
    with pytest.raises(UserError, match="--fake-world-size says 8 ranks and the variable WORLD_SIZE says 4"):
        read_command(COMMAND.split(), {"WORLD_SIZE": "4"})
