"""Times of a real run: written beside the simulator's, read again, and what is chosen by them."""

import json
from dataclasses import replace

import pytest
from trained import distance, set_up, trained

from mindspeed_core.errors import UserError
from mindspeed_pp.choice import shortest
from mindspeed_pp.engine import EngineState
from mindspeed_pp.placement import loop, mirrored
from mindspeed_pp.plan import Plan
from mindspeed_pp.profiling import Profiling, better
from mindspeed_pp.program import main
from mindspeed_pp.registry import rule_named
from mindspeed_pp.stage_times import KEY, Measured, read_times, times_of_spans
from mindspeed_testing import run_world

PP2 = ("--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights")
SLOW_FORWARD = Measured(((1.0, 0.05, 0.05),) * 2)


def profiled(file):
    found = {}
    cases = {
        "plain": ("--pipeline-schedule", "zb-h1"),
        "zbv": ("--pipeline-schedule", "zbv"),
        "measured": ("--pipeline-schedule", "zb-h1", "--profile-pipeline", file),
        "native": ("--profile-pipeline", file + ".native", "--profile-pipeline-steps", "1"),
        "auto": ("--pipeline-schedule", "auto", "--profile-pipeline", file + ".auto"),
        "from": ("--pipeline-schedule", "auto", "--pipeline-times-from", file),
    }
    for name, flags in cases.items():
        with set_up(*PP2, *flags) as run:
            found[name] = trained(run, steps=5)
            state = run.session.state(Profiling)
            assert state.done == ("--profile-pipeline" in flags)
            found[name].plan = run.session.state(EngineState).plan
            found[name].plan = found[name].plan and found[name].plan.rule.name
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    file = tmp_path_factory.mktemp("profiles") / "profile.json"
    return run_world(profiled, 2, str(file), timeout=300), file


def test_measuring_changes_no_bit(ranks):
    (first, _), _ = ranks
    assert first["measured"].losses == first["plain"].losses
    assert distance(first["measured"].gradients, first["plain"].gradients) == 0


def test_a_profile_has_every_action_beside_the_simulators_and_times_of_stages(ranks):
    _, file = ranks
    record = json.loads(file.read_text())
    names = {e["pid"]: e["args"]["name"] for e in record["traceEvents"] if e["name"] == "process_name"}
    assert names == {
        0: "schedule zb-h1, measured",
        1: "schedule zb-h1, simulated with measured times",
    }
    spans = [[e for e in record["traceEvents"] if e["ph"] == "X" and e["pid"] == pid] for pid in (0, 1)]
    assert sorted(e["name"] for e in spans[0]) == sorted(e["name"] for e in spans[1])
    assert len(spans[0]) == 2 * 8 * 3
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans[0])
    assert record[KEY]["layers"] == 4
    assert len(record[KEY]["stages"]) == 2
    assert min(map(min, record[KEY]["stages"])) > 0


def test_without_a_schedule_the_native_order_is_measured(ranks):
    (first, _), file = ranks
    assert first["native"].executed == "1f1b"
    assert "schedule 1f1b, measured" in (file.parent / (file.name + ".native")).read_text()


def test_auto_chooses_by_measured_times_and_all_ranks_alike(ranks):
    (first, second), _ = ranks
    assert first["auto"].plan == second["auto"].plan
    assert first["auto"].executed == second["auto"].executed
    assert first["from"].executed == second["from"].executed
    assert first["auto"].losses == first["zbv"].losses


def test_another_schedule_takes_over_where_it_is_shorter_on_the_same_placement():
    plan = Plan(rule_named("1f1b"), 2, 1)
    assert better(plan, SLOW_FORWARD, 8) is None
    split = Plan(rule_named("zb-h1"), 2, 1)
    assert better(split, Measured(((1.0, 1.0, 1.0),) * 2), 8) is None
    interleaved = Plan(rule_named("interleaved"), 2, 2)
    assert better(interleaved, Measured(((1.0, 1.0, 1.0),) * 4), 8) is None
    # Its linears can put weight gradients off, so that zbi may take over from nano-pipe.
    nano = Plan(rule_named("nanopipe"), 8, 2)
    found = better(nano, Measured(((1.0, 1.0, 1.0),) * 16), 32)
    assert found is not None
    assert found.rule.name == "zbi"
    assert better(replace(nano, limit=7), Measured(((1.0, 1.0, 1.0),) * 16), 32) is None


def test_stages_are_cut_and_joined_by_their_share_of_the_model():
    measured = Measured(((2.0, 4.0, 6.0), (4.0, 8.0, 2.0)))
    assert measured.of_stages(loop(4)) == ((1.0, 2.0, 3.0),) * 2 + ((2.0, 4.0, 1.0),) * 2
    assert measured.of_stages(loop(1)) == ((6.0, 12.0, 8.0),)
    assert measured.of_stages(loop(2)) == measured.stages
    assert measured.of_stages(mirrored(2, copies=2)) == measured.stages * 2
    assert measured.of_rank(2) == (3.0, 6.0, 4.0)
    assert sum(f for f, _, _ in measured.of_stages(loop(3))) == pytest.approx(6.0)


def test_times_are_medians_and_whole_passes_are_halved():
    spans = [("F", 0, 1.0), ("F", 0, 9.0), ("F", 0, 2.0), ("A", 0, 4.0)]
    spans += [("R", 1, 3.0), ("B", 1, 1.0), ("W", 1, 2.0), ("A", 1, 99.0)]
    assert times_of_spans(spans, 2) == ((2.0, 2.0, 2.0), (3.0, 1.0, 2.0))


def test_measured_times_decide_what_is_chosen():
    def chosen(chunks, *measured):
        return shortest(4, chunks, 16, 16, (1.0, 1.0, 1.0), True, Measured(*measured))

    even, light_weights = ((1.0, 1.0, 1.0),) * 8, ((1.0, 1.5, 0.1),) * 8
    assert [chosen(None, even, message) for message in (0.0, 10.0)] == ["zbv", "zb-h1"]
    assert [chosen(2, light_weights, message) for message in (0.0, 0.3)] == ["zbi", "interleaved"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "cannot be read"),
        ("[]", "has no times of stages"),
        ('{"pipeline_times": {"stages": [[1, 2]], "message": 0}}', "has no times of stages"),
        ('{"pipeline_times": {"stages": [[0, 0, 0]], "message": 0}}', "no numbers above 0"),
    ],
)
def test_a_file_without_times_is_refused(tmp_path, text, message):
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_times(str(path))


def test_the_program_takes_measured_times(tmp_path, capsys):
    path = tmp_path / "times.json"
    record = {"stages": [[0.5, 0.5, 0.5]] * 8, "message": 0.0, "layers": 8}
    path.write_text(json.dumps({KEY: record}))
    assert main(["show", "1f1b", "-p", "4", "-m", "16", "--times-from", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == pytest.approx(57.0)
    assert main(["compare", "-p", "4", "-m", "16", "--times-from", str(path)]) == 0
    assert ": step 49.5, 4 micro-batches alive" in capsys.readouterr().out
