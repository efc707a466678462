import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from synthetic_ranks import every_stage, record, stages

from mindspeed_core.errors import UserError
from mindspeed_tune.chrome_trace import chrome_trace
from mindspeed_tune.command import program
from mindspeed_tune.driver import records_of
from mindspeed_tune.hardware import read_hardware
from mindspeed_tune.html_report import html_report
from mindspeed_tune.kinds import chosen_ranks, group_partners, kinds_of, stage_partners
from mindspeed_tune.launch_plan import make_plan
from mindspeed_tune.layout import Layout
from mindspeed_tune.record import Backend, Relief
from mindspeed_tune.summary import markdown, print_summary

LAYOUT = Layout(64, tp=2, pp=4)
COMMAND = ("mindspeed-train", "--num-layers", "16")


@pytest.fixture(scope="module")
def hardware():
    return read_hardware("ascend-910b")


@pytest.fixture(scope="module")
def plan(hardware):
    return make_plan(COMMAND, every_stage(LAYOUT), hardware)


def test_stages_with_the_same_contents_are_one_kind():
    kinds = kinds_of(LAYOUT, stages(LAYOUT))
    assert [kind.name for kind in kinds] == ["stage 0", "stages 1 to 2", "stage 3"]
    assert [kind.count for kind in kinds] == [16, 32, 16]
    assert [kind.representative for kind in kinds] == [0, 16, 48]
    assert [kind.name for kind in kinds_of(Layout(4), stages(Layout(4)))] == ["all ranks"]


def test_uneven_stages_are_kinds_of_their_own():
    kinds = kinds_of(LAYOUT, stages(LAYOUT, [3, 4, 5, 4]))
    assert [kind.stages for kind in kinds] == [(0,), (1,), (2,), (3,)]


def test_one_pair_of_neighbouring_stages_is_run_for_every_pair_of_kinds():
    layout = Layout(16, pp=16)
    kinds = kinds_of(layout, stages(layout))
    assert stage_partners(layout, kinds) == [0, 1, 2, 14, 15]


def test_every_kind_of_call_gets_a_partner_at_the_far_end_of_its_group():
    found, checked = record(LAYOUT), set()
    assert group_partners(found, [0, 16], checked) == [14, 1]
    assert group_partners(found, [0, 16], checked) == []


class Recorded:
    """Ranks that have their records already, and notes what is asked of them."""

    def __init__(self):
        self.command = SimpleNamespace(world_size=LAYOUT.world_size)
        self.asked = []

    def run(self, ranks, *, only_order=False):
        self.asked += [(rank, only_order) for rank in ranks]
        return [record(LAYOUT, rank) for rank in ranks]


def test_without_partners_one_rank_of_every_kind_is_run():
    alone, compared = Recorded(), Recorded()
    records_of(alone, partners=False)
    records_of(compared)
    assert alone.asked == [(0, False), (16, False), (48, False)]
    assert compared.asked[:3] == alone.asked
    assert compared.asked[3:]
    assert all(only_order for _, only_order in compared.asked[3:])


def test_ranks_are_chosen_by_numbers_and_ranges():
    assert chosen_ranks("0,5,8:16:4", 16) == [0, 5, 8, 12]
    with pytest.raises(UserError, match="rank 16 is not in a world of 16 ranks; they are 0 to 15"):
        chosen_ranks("16", 16)
    with pytest.raises(UserError, match="'some' is no rank"):
        chosen_ranks("some", 16)


def test_memory_falls_with_the_stage_and_includes_what_the_first_update_adds(plan):
    memory = plan.stages()
    assert [one.stage for one in memory] == [0, 1, 2, 3]
    needed = [one.categories["activations"] for one in memory]
    assert needed == sorted(needed, reverse=True)
    assert all(one.categories["optimizer state"] == 8e5 for one in memory)
    assert all(one.fits for one in memory)


def test_a_stage_over_capacity_says_by_how_much_and_what_would_fit(hardware):
    small = replace(hardware, memory=50e6, context=0.0, per_group=0.0)
    plan = make_plan(COMMAND, every_stage(LAYOUT, microbatches=64), small)
    full = make_plan(COMMAND, every_stage(LAYOUT, microbatches=64)).fullest.fullest.exact
    assert plan.ok
    tight = replace(small, memory=full * 0.9)
    plan = make_plan(COMMAND, every_stage(LAYOUT, microbatches=64), tight)
    assert not plan.ok
    [problem] = [one for one in plan.problems if one.startswith("stage 0")]
    assert "are missing on 16 ranks" in problem
    assert "the nearest layout that fits" in problem
    tiny = replace(small, memory=10.0)
    problem = make_plan(COMMAND, every_stage(LAYOUT), tiny).problems[0]
    assert "no layout" in problem
    assert "the smallest needs an estimated" in problem


def test_a_swapped_collective_makes_the_plan_fail():
    ranks = every_stage(LAYOUT)
    first = ranks[0].runs[0]
    calls = [
        replace(call, bytes=call.bytes * 2) if call.operation == "isend" else call for call in first.calls
    ]
    ranks[0] = replace(ranks[0], runs=(replace(first, calls=tuple(calls)), *ranks[0].runs[1:]))
    plan = make_plan(COMMAND, ranks)
    assert not plan.ok
    assert "order of calls: PIPELINE_MODEL_PARALLEL_GROUP: ranks 0 and 16" in plan.problems[0]


def without(ranks, position, operation):
    """Return records of which one rank lacks its first call of an operation."""
    first = ranks[position].runs[0]
    left = list(first.calls)
    left.remove(next(call for call in left if call.operation == operation))
    changed = replace(ranks[position], runs=(replace(first, calls=tuple(left)), *ranks[position].runs[1:]))
    return [*ranks[:position], changed, *ranks[position + 1 :]]


def swapped(ranks, position):
    """Return records of which one rank makes two neighbouring collectives in the other order."""
    first = ranks[position].runs[0]
    calls = list(first.calls)
    place = next(n for n, call in enumerate(calls) if call.operation == "reduce_scatter_tensor")
    calls[place - 1], calls[place] = calls[place], calls[place - 1]
    changed = replace(ranks[position], runs=(replace(first, calls=tuple(calls)), *ranks[position].runs[1:]))
    return [*ranks[:position], changed, *ranks[position + 1 :]]


WRONG = {
    "a swapped collective": (
        lambda: swapped([record(LAYOUT, 0), record(LAYOUT, 1)], 1),
        (),
        "order of calls: TENSOR_MODEL_PARALLEL_GROUP: ranks 0 and 1 differ at call",
    ),
    "a missing receive": (
        lambda: without(every_stage(LAYOUT), 1, "irecv"),
        (),
        "order of calls: PIPELINE_MODEL_PARALLEL_GROUP: ranks 0 and 16 differ at call",
    ),
    "a stage over capacity": (
        lambda: every_stage(LAYOUT, static={"parameters": 1e12}, update=huge_update()),
        ("--plan-hardware", "ascend-910b"),
        "stage 0: ",
    ),
}


def huge_update():
    from synthetic_ranks import update

    return replace(update(LAYOUT), after={"optimizer state": 1e12})


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_launch_is_named_and_is_exit_status_1(monkeypatch, case):
    ranks, options, named = WRONG[case]
    monkeypatch.setattr("mindspeed_tune.driver.records_of", lambda runner, wanted: ranks())
    monkeypatch.setattr("mindspeed_tune.driver.Ranks", lambda *args, **options: nullcontext())
    found = CliRunner().invoke(program, ["plan", *options, "--json", "--", *COMMAND, "--fake-world-size=64"])
    assert found.exit_code == 1, found.output
    problems = json.loads(found.stdout)["problems"]
    assert problems[0].startswith(named)


def test_a_backend_of_the_planned_platform_takes_what_it_declares(hardware):
    takes = Backend(3e9, "reduce_scatter_tensor in DATA_PARALLEL_GROUP_WITH_CP")
    ranks = every_stage(LAYOUT, backend=takes)
    without_hardware, with_hardware = (make_plan(COMMAND, ranks, one) for one in (None, hardware))
    memory = without_hardware.fullest.fullest
    assert memory.outside == 3e9
    assert memory.needed == memory.reserved + 3e9
    assert "during reduce_scatter_tensor in DATA_PARALLEL_GROUP_WITH_CP" in markdown(without_hardware)
    # Its file speaks for the library of the device.
    assert (
        with_hardware.fullest.fullest.outside
        == make_plan(COMMAND, every_stage(LAYOUT), hardware).fullest.fullest.outside
    )
    assert "the backend takes" not in markdown(with_hardware)


def test_bytes_of_the_host_are_told_apart():
    plan = make_plan(COMMAND, every_stage(LAYOUT, host_bytes=3 * 2**20))
    assert "up to 3.00 MiB of tensors lie in the host's memory" in markdown(plan)
    assert {kind["host_bytes"] for kind in plan.as_json()["kinds"]} == {3 * 2**20}
    assert "host's memory" not in markdown(make_plan(COMMAND, every_stage(LAYOUT)))


def test_a_step_has_seconds_bubble_and_mfu(plan):
    step = plan.step
    assert step.seconds > step.timeline.seconds > 0
    assert 0 < step.mfu < 1
    assert 0 < step.timeline.bubble < 0.5
    without = make_plan(COMMAND, every_stage(LAYOUT)).step
    assert without.seconds is None
    assert without.timeline.bubble == pytest.approx(3 / 11, abs=0.02)


def test_a_rank_of_an_uneven_division_is_reported():
    far = record(LAYOUT, 14, static={"parameters": 1.0})
    plan = make_plan(COMMAND, [*every_stage(LAYOUT), far])
    assert set(plan.differing) == {14}


def test_all_outputs_are_made_of_the_same_plan(plan, capsys):
    again = json.loads(json.dumps(plan.as_json()))
    assert again["ok"]
    assert [kind["count"] for kind in again["kinds"]] == [16, 32, 16]
    print_summary(plan)
    printed = capsys.readouterr().out
    text = markdown(plan)
    for words in ("stages 1 to 2", "64 ranks", "TENSOR_MODEL_PARALLEL_GROUP", "what would help"):
        assert words in printed
        assert words.lower() in text.lower()


def test_the_trace_has_a_lane_for_each_stage_without_overlaps(plan):
    events = [event for event in chrome_trace(plan)["traceEvents"] if event["ph"] == "X"]
    for stage in range(4):
        lane = sorted((event["ts"], event["dur"]) for event in events if event["tid"] == stage)
        assert len(lane) == 2 * 8 + 2
        assert all(a + length <= b + 0.01 for (a, length), (b, _) in pairwise(lane))


def test_the_page_stands_alone_and_tells_people_what_to_do(plan):
    page = html_report(plan)
    assert page.count("<svg viewBox") == 3
    for never in ("<script", "http://", "https://", "src=", "@import", "url("):
        assert never not in page
    for always in ("prefers-color-scheme:dark", 'lang="en"', 'role="img"', "What would help", "stage 3"):
        assert always in page


def test_a_feature_that_would_keep_less_is_advised_by_name_where_it_takes_part(hardware):
    flash = Relief("flash", "--flash", ("core_attention",), 1000.0)
    worse = Relief("half", "--half", ("core_attention",), 400_000.0)
    absent = Relief("norms", "--norms", ("input_layernorm",), 10.0)
    ranks = [replace(one, reliefs=(worse, flash, absent)) for one in every_stage(LAYOUT)]
    for index, one in enumerate(ranks):
        runs = [replace(run, peak=attended(run.peak)) for run in one.runs]
        ranks[index] = replace(one, runs=tuple(runs))
    plan = make_plan(COMMAND, ranks, hardware)
    [advice] = [one for one in plan.fullest.fullest.advice if one.feature]
    # Four micro-batches are in flight on the first stage.
    now = plan.fullest.fullest.modules["decoder.layers.*.core_attention"]
    assert (advice.feature, advice.flags, advice.saves) == ("flash", "--flash", now - 4 * 1000.0)
    page = html_report(plan)
    assert page.count('<span class="name">flash</span>') == 1
    assert "| --flash | flash |" in markdown(plan)


def attended(peak):
    """Return a peak whose activations are those of core attention."""
    kept = peak.modules["TransformerLayer"]
    return replace(peak, modules={"decoder.layers.*.core_attention": kept})


def test_the_operation_and_code_of_the_peak_are_told(plan):
    memory = plan.fullest.fullest
    assert (memory.operator, memory.stack) == ("aten.mm", ("mlp.py:80 (forward)",))
    assert "during aten.mm (mlp.py:80 (forward))" in markdown(plan)
    assert plan.as_json()["kinds"][0]["memory"][0]["operator"] == "aten.mm"
    assert "mlp.<wbr>py:80 (forward)" in html_report(plan)
