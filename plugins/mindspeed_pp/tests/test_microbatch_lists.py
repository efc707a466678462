"""Micro-batches of different size: how a list is read and searched, and that it trains the whole batch."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from trained import PP2, UNTIED, distance, initial_state, set_up, trained

from mindspeed_core.errors import DataError, UserError
from mindspeed_core.run import Batch
from mindspeed_megatron.formulas import ELEMENT_SIZE, evaluate, formula_of
from mindspeed_megatron.instruments.communication import count_communication
from mindspeed_pp.features import MicrobatchSizes
from mindspeed_pp.list_search import makespan, shortest_list
from mindspeed_pp.microbatch_list import EXAMPLES, parse_sizes, rule_of_orders
from mindspeed_pp.rule import Context
from mindspeed_pp.uneven_microbatches import Weighing, regrouped
from mindspeed_testing import run_world

LIST = ("--optimized-mbs-list", "1,2,3,2")


@pytest.mark.parametrize("text", ["1,2,3", "[1, 2, 3]", " 1, 2 ,3 "])
def test_a_list_is_numbers_between_commas(text):
    assert parse_sizes("--optimized-mbs-list", text) == (1, 2, 3)


@pytest.mark.parametrize(("name", "microbatches"), [("example-config-1", 16), ("example-config-2", 24)])
def test_the_search_finds_the_lists_of_ascendspeed(name, microbatches):
    ranks, sizes = EXAMPLES[name]
    found = shortest_list(ranks, microbatches, 4, (1.0, 1.0, 1.0))
    assert found == sizes
    constant = makespan(ranks, (4,) * microbatches, 4, (1.0, 1.0, 1.0))
    bubbles = [time - 3 * microbatches for time in (makespan(ranks, found, 4, (1.0, 1.0, 1.0)), constant)]
    assert bubbles[0] / bubbles[1] == pytest.approx({4: 0.694, 8: 0.762}[ranks], abs=1e-3)


def test_passes_with_a_cost_of_their_own_leave_equal_micro_batches_where_those_are_shorter():
    assert shortest_list(2, 4, 1, (1.0, 1.0, 1.0), largest=1) == (1, 1, 1, 1)


@settings(deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=6), st.booleans())
def test_cutting_anew_keeps_every_sample_in_order(each, sizes, record):
    total = sum(sizes)
    rest = -total % each
    sizes = [*sizes, rest] if rest else sizes
    whole = torch.arange(sum(sizes) * 3).reshape(-1, 3)
    batches = [{"tokens": whole[i : i + each], "labels": None} for i in range(0, len(whole), each)]
    given_batches = [Batch(**batch) for batch in batches] if record else batches
    found = list(regrouped(iter(given_batches), sizes, each))
    tokens = [batch.tokens if record else batch["tokens"] for batch in found]
    assert [len(part) for part in tokens] == sizes
    assert torch.equal(torch.cat(tokens), whole)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ([1], "a micro-batch is a list"),
        ({"tokens": torch.zeros(2, 3), "lengths": torch.zeros(5)}, r"lengths .* of shape \[5\]"),
        ({"tokens": torch.zeros(2, 3), "name": "x"}, "name of a micro-batch is a str"),
        (None, "a micro-batch is a NoneType"),
    ],
)
def test_what_cannot_be_cut_is_refused(sample, message):
    with pytest.raises(DataError, match=message):
        next(regrouped(iter([sample] if sample is not None else []), [1, 1], 2))


def loss_of(weighing, made, microbatch=0, per_token=False):
    config = SimpleNamespace(calculate_per_token_loss=per_token)
    _, loss = weighing.around(lambda: (None, lambda output: made), microbatch, config)()
    return loss(None)


def test_means_count_by_their_samples_and_sums_over_tokens_do_not():
    weighing, one = Weighing((1, 3)), torch.ones(1)
    assert loss_of(weighing, (one, 7, {}))[0] == 0.5
    assert loss_of(weighing, (one, 7, {}), 1)[0] == 1.5
    assert loss_of(weighing, (one, 7, {}), 1, per_token=True)[0] == 1
    loss, report = loss_of(weighing, (one, {"mean": one, "sum": torch.ones(2)}), 1, per_token=True)
    assert (loss, report["mean"], report["sum"].tolist()) == (1.5, 1.5, [1, 1])


def test_a_mean_without_weights_is_refused_where_sizes_differ():
    with pytest.raises(UserError, match=r"a mean over each micro-batch.*drop the flag"):
        loss_of(Weighing((1, 3), weighs=False), (torch.ones(1), {}))
    assert loss_of(Weighing((2, 2), weighs=False), (torch.ones(1), {}))[0] == 1


def test_losses_of_experts_count_by_samples_too():
    before = MoEAuxLossAutoScaler.main_loss_backward_scale
    config = SimpleNamespace(
        calculate_per_token_loss=False, num_moe_experts=4, grad_scale_func=lambda x: 8 * x
    )
    try:
        MoEAuxLossAutoScaler.main_loss_backward_scale = torch.ones(1)
        Weighing((1, 3)).scale_further_losses(1, config, 1, torch.device("cpu"))
        # Half of the micro-batches, one and a half times, of a loss that is scaled by 8.
        assert MoEAuxLossAutoScaler.main_loss_backward_scale == 6
    finally:
        MoEAuxLossAutoScaler.main_loss_backward_scale = before


def test_orders_of_upstream_are_a_schedule():
    text = '{"stage0": ["F0", "F1", "B0", "B1"], "stage1": ["F0", "B0", "F1", "B1"]}'
    schedule = rule_of_orders(text, 2).schedule(Context(2, 1, 2))
    assert [" ".join(map(str, order)) for order in schedule.orders] == [
        "F0.0 F0.1 A0.0 A0.1",
        "F1.0 A1.0 F1.1 A1.1",
    ]


def sent(cases):
    """Bytes that a rank sends to its neighbour in one step, and what the formula says of both ranks."""
    found = []
    for flags in cases:
        with set_up(*PP2, UNTIED, "--optimize-send-recv-comm", *flags) as run:
            # The first step warms up.
            run.session.call("train_step", run=run)
            with count_communication() as log:
                run.session.call("train_step", run=run)
            formula = formula_of(MicrobatchSizes, "bytes_sent_of_step", "cpu")
            values = vars(run.args) | {ELEMENT_SIZE: 4}
            found.append((log.input_bytes("isend"), evaluate(formula, values)))
    return found


def test_any_list_sends_as_many_bytes_across_a_border():
    cases = (LIST, ("--optimized-mbs-list", "8"), ("--micro-batch-size", "2"))
    for one, other in zip(*run_world(sent, 2, cases)):
        assert one[0] + other[0] == one[1] == 2 * 8 * 32 * 64 * 4


CASES = {
    "list": LIST,
    "zbv": (*LIST, "--pipeline-schedule", "zbv"),
    "read in threes": ("--micro-batch-size", "4", *LIST),
    "searched": ("--micro-batch-size", "2", "--automated-pipeline-perf"),
}


def all_listed(cases, initial):
    found = {}
    for name, flags in cases.items():
        with set_up(*PP2, *flags, initial=initial) as run:
            found[name] = trained(run, evaluates=True)
    return found


def compare(cases, *model):
    model = (*model, "--eval-iters", "1")
    whole = ("--micro-batch-size", "8", *model)
    ((initial, _),) = run_world(initial_state, 1, model)
    ((alone),) = run_world(all_listed_alone, 1, whole, initial)
    for rank in run_world(all_listed, 2, {n: (*model, *f) for n, f in cases.items()}, initial, timeout=600):
        for name, result in rank.items():
            assert result.losses == pytest.approx(alone.losses, rel=1e-6), name
            assert result.evaluated == pytest.approx(alone.evaluated, rel=1e-5), name
            if result.gradients:
                assert distance(result.gradients, alone.gradients) < 3e-6, name


def all_listed_alone(flags, initial):
    with set_up(*flags, initial=initial) as run:
        return trained(run, evaluates=True)


def test_a_list_trains_what_one_process_trains_on_the_whole_batch():
    compare({name: CASES[name] for name in ("list", "zbv")}, UNTIED)


@pytest.mark.thorough
@pytest.mark.parametrize("model", [(), ("--calculate-per-token-loss",)], ids=["means", "tokens"])
def test_every_way_to_say_the_sizes(model):
    compare({name: flags for name, flags in CASES.items() if name != "zbv"}, *model)
