"""Actions beside passes: to the host and back, reductions by hand, functions of other packages, pairs."""

from types import SimpleNamespace

import pytest
import torch
from trained import distance, set_up, trained

from mindspeed_core.errors import UserError
from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_pp import named
from mindspeed_pp.actions import NAMED, SI, SO, A, B, F, R, W, X, parse_action
from mindspeed_pp.engine import EngineState
from mindspeed_pp.lint import lint
from mindspeed_pp.placement import loop
from mindspeed_pp.registry import rule_named
from mindspeed_pp.rule import Context
from mindspeed_pp.schedule import made, parse_schedule
from mindspeed_pp.simulator import Costs, simulate
from mindspeed_pp.swaps import Activations, HostCopies, Kept
from mindspeed_pp.transforms import swapped_operands
from mindspeed_pp.weight_gradients import WeightGradients
from mindspeed_testing import run_world

MODEL = ("--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights")
IN_PLACE = ("--use-gradient-accumulation-fusion", "--use-distributed-optimizer", "--overlap-grad-reduce")
CHUNKS2 = ("--num-virtual-stages-per-pipeline-rank", "2")
CALLED = []


def called(action):
    CALLED.append((action.stage, action.microbatch, type(action.model).__name__))


def schedules(folder):
    """Files: 1F1B with activations on the host, and with a named action behind each forward pass."""
    plain = rule_named("1f1b").schedule(Context(2, 1, 8))
    swapped, calling = [], []
    for order in plain.orders:
        more = []
        for action in order:
            place = action.stage, action.microbatch
            waits = order.index(A(*place)) - order.index(F(*place)) > 2
            more += [SI(*place)] if action.op == "A" and waits else []
            more += [action] + ([SO(*place)] if action.op == "F" and waits else [])
        swapped.append(more)
        calling.append([x for a in order for x in ([a, X("note", *a[1:3])] if a.op == "F" else [a])])
    for name, orders in (("swapped", swapped), ("calling", calling)):
        (folder / name).write_text(made(name, plain.placement, 8, orders).text())


def all_trained(folder):
    named.installed_extensions = lambda point: SimpleNamespace(
        sound=lambda: {"note": called}, get=lambda name: called
    )
    cases = {
        "1f1b": ("--pipeline-schedule", "1f1b"),
        "swapped": ("--pipeline-schedule-file", f"{folder}/swapped"),
        "calling": ("--pipeline-schedule-file", f"{folder}/calling"),
        "1f1b, in place": ("--pipeline-schedule", "1f1b", *IN_PLACE),
        "swapped, in place": ("--pipeline-schedule-file", f"{folder}/swapped", *IN_PLACE),
        "nanopipe": ("--use-nanopipe", *CHUNKS2),
        "nanopipe-swap": ("--use-nanopipe", "--use-nanopipe-swap", *CHUNKS2),
        "dualpipev": ("--pipeline-schedule", "dualpipev"),
        "paired": ("--pipeline-schedule", "dualpipev"),
    }
    found = {}
    for name, flags in cases.items():
        with set_up(*MODEL, *flags) as run:
            pairs = []
            if name == "paired":

                def together(forward, backward, pairs=pairs):
                    pairs.append(1)
                    backward()
                    forward()

                run.session.state(EngineState).combined = together
            found[name] = trained(run)
            copies = run.session.state(EngineState).copies
            found[name].moved = copies and (copies.moved, copies.away_now)
            found[name].pairs = len(pairs)
    found["calls"] = list(CALLED)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orders")
    schedules(folder)
    return run_world(all_trained, 2, str(folder), timeout=300)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("swapped", "1f1b"),
        ("swapped, in place", "1f1b, in place"),
        ("calling", "1f1b"),
        ("nanopipe-swap", "nanopipe"),
        ("paired", "dualpipev"),
    ],
)
def test_an_action_changes_no_bit(ranks, name, plain):
    for rank in ranks:
        assert rank[name].losses == rank[plain].losses
    assert distance(ranks[0][name].gradients, ranks[0][plain].gradients) == 0


@pytest.mark.parametrize("name", ["swapped", "nanopipe-swap"])
def test_what_went_to_the_host_came_back_and_counts_as_the_simulator_says(ranks, name):
    # Nano-pipe leaves weight gradients of the last rank late, 1F1B activations of the first one.
    rank = ranks[0 if name == "swapped" else 1][name]
    moved, away = rank.moved
    assert moved > 100_000
    assert away == 0
    if name == "swapped":
        plain, fewer = (ranks[0][each].alive for each in ("1f1b", "swapped"))
        assert fewer <= plain
    else:
        schedule = swapped_operands(rule_named("nanopipe").schedule(Context(2, 2, 8)))
        assert [r[name].alive for r in ranks] == [2 * peak for peak in simulate(schedule).peaks]
        assert ranks[1][name].alive < ranks[1]["nanopipe"].alive


def test_functions_are_called_with_their_place(ranks):
    for rank, found in enumerate(ranks):
        # Two steps of eight micro-batches.
        assert [(stage, i) for stage, i, _ in found["calls"]] == [(rank, i) for i in range(8)] * 2


def test_pairs_are_handed_to_whoever_combines_them(ranks):
    schedule = rule_named("dualpipev").schedule(Context(2, 2, 8))
    for rank, found in enumerate(ranks):
        pairs = [action for action in schedule.orders[rank] if action.parts]
        # The second rank holds stages 1 and 2, one of which hands over to the other, of other micro-batches.
        assert found["paired"].pairs == 2 * len(pairs) > 0


def test_a_name_that_nobody_brings_is_refused(monkeypatch):
    schedule = made("calls", loop(1), 1, [[F(0, 0), X("nobody", 0, 0), A(0, 0)]])
    lint(schedule)
    with pytest.raises(UserError, match="no installed package has the action 'nobody'"):
        named.functions_of(schedule)


@pytest.mark.parametrize("action", [SO(3, 1), SI(0, 2), X("a-b", 1, 7)])
def test_the_text_of_an_action_is_read_again(action):
    assert parse_action(str(action)) == action


def test_the_text_of_a_schedule_with_further_actions_is_read_again():
    order = [F(0, 0), SO(0, 0), X("note", 0, 0), SI(0, 0), B(0, 0), W(0, 0)]
    schedule = made("more", loop(1), 1, [order])
    assert parse_schedule(schedule.text()) == schedule
    assert schedule.csv() == "0F0,0I0,0W0\n"
    assert NAMED + "note" in schedule.text()


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([F(0, 0), SO(0, 0), A(0, 0)], "SO0.0 comes without SI0.0"),
        ([F(0, 0), SI(0, 0), A(0, 0)], "SI0.0 comes without SO0.0"),
        ([F(0, 0), SO(0, 0), A(0, 0), SI(0, 0)], "circle"),
        ([SO(0, 0), F(0, 0), SI(0, 0), A(0, 0)], "circle"),
        ([F(0, 0), SI(0, 0), SO(0, 0), A(0, 0)], "circle"),
        ([F(0, 0), B(0, 0), SO(0, 0), W(0, 0), SI(0, 0)], "circle"),
        ([F(0, 0), A(0, 0), SO(0, 0), SI(0, 0)], "SO0.0 sends away what its backward pass used up"),
        ([F(0, 0), SO(0, 0), SI(0, 0), R(0, 0), A(0, 0)], "computes again what SO0.0 sends to the host"),
    ],
)
def test_swaps_out_of_order_are_refused(order, message):
    with pytest.raises(UserError, match=message):
        lint(made("wrong", loop(1), 1, [order]))


def test_operands_leave_behind_their_gradient_and_come_two_actions_before_their_use():
    plain = rule_named("nanopipe").schedule(Context(4, 2, 8))
    swapped = swapped_operands(plain)
    lint(swapped)
    last = swapped.orders[3]
    first = next(action for action in last if action.op == "SO")
    place = first.stage, first.microbatch
    assert last[last.index(first) - 1] == B(*place)
    between = last[last.index(SI(*place)) + 1 : last.index(W(*place))]
    assert sum(action.op != "SI" for action in between) == 2
    assert simulate(swapped).makespan == simulate(plain).makespan
    assert simulate(plain).peaks == (5.5, 5.5, 5.5, 5.5)
    assert simulate(swapped).peaks == (5.5, 4.5, 3.5, 2.5)
    # A way back that is too slow for what is between lengthens the step.
    assert simulate(swapped, Costs(swap=9.0)).makespan > simulate(plain).makespan


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 8), (4, 4), (4, 16)])
def test_rank_r_moves_the_operands_of_2r_passes(ranks, microbatches):
    swapped = swapped_operands(rule_named("nanopipe").schedule(Context(ranks, 2, microbatches)))
    moved = [sum(action.op == "SO" for action in order) for order in swapped.orders]
    assert moved == [2 * rank for rank in range(ranks)]


def test_saved_tensors_go_to_the_host_and_come_back_with_shape_and_strides():
    copies = HostCopies(CpuPlatform())
    kept = Activations(copies)
    weight = torch.nn.Parameter(torch.randn(64, 64))
    x = torch.randn(64, 64, requires_grad=True)
    with kept.of((0, 0), [weight]):
        y = ((x @ weight).t().contiguous().exp() * x.t()).sum()
    kept.leave((0, 0))
    assert copies.away_now > 0
    kept.come((0, 0))
    assert copies.away_now == 0
    y.backward()
    other = x.detach().clone().requires_grad_()
    ((other @ weight).t().contiguous().exp() * other.t()).sum().backward()
    assert torch.equal(x.grad, other.grad)


def test_a_host_buffer_serves_again():
    copies = HostCopies(CpuPlatform())
    first = Kept(copies, torch.arange(6.0).view(2, 3).t())
    first.leave()
    first.come()
    assert torch.equal(first.tensor(), torch.arange(6.0).view(2, 3).t())
    second = Kept(copies, torch.ones(6))
    second.leave()
    assert not any(copies._free.values())
    assert torch.equal(second.tensor(), torch.ones(6))


def test_operands_on_the_host_give_the_same_gradient():
    store, sums = WeightGradients(), []
    x, gradient = torch.randn(3, 4), torch.randn(3, 5)
    for place in ((0, 0), (0, 1)):
        store.leaves = place
        store.leave(lambda x, g: sums.append(g.t() @ x), x, gradient)
        store.leave(lambda x: sums.append(x), x)
    store.leaves = None
    copies = HostCopies(CpuPlatform())
    store.go((0, 0), copies)
    assert copies.away_now == (12 + 15) * 4
    store.come((0, 0))
    for place in ((0, 0), (0, 1)):
        store.run(place)
    assert torch.equal(sums[0], sums[2])
    assert torch.equal(sums[1], sums[3])
