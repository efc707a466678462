"""Plans of communication: bytes on the wire are those of the formulas, nothing is lost or summed twice."""

import json
from unittest.mock import patch

import pytest
import torch

from mindspeed_core.activation import activate, plan_for, prepare
from mindspeed_core.discovery.extensions import ExtensionError
from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import DeclarationError
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_megatron.instruments.communication import count_communication
from mindspeed_moe import comm_plans
from mindspeed_moe.comm_plans import Exchanged, Hop, cheapest, check_planner, hops_of
from mindspeed_moe.features.proofs import EP2, GATHERED, MODEL, OVERLAP, SHARED, TP2
from mindspeed_moe.hops import packed, unpacked
from mindspeed_moe.plan_groups import hop_parts
from mindspeed_moe.row_spread import gathered_sum, spread
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags

HIDDEN, EXPERTS, CHOICES, RANKS = 64, 16, 4, 4
EP4 = ("--expert-model-parallel-size", "4")
CHOSEN = (*MODEL, *EP4, "--num-experts", str(EXPERTS), "--moe-router-topk", str(CHOICES))
ONE_CALL = (*CHOSEN, "--num-layers", "1", "--global-batch-size", "4")
NODES = ("--moe-node-size", "2")
PLANS = {
    "flat": (),
    "zerc": ("--moe-zerc",),
    "dedup": ("--moe-comm-plan", "dedup", *NODES),
    "gather": ("--moe-comm-plan", "gather", *NODES),
}
INSTALLED = Registry.discover()


def routed(maps, original):
    def forward(self, *args, **options):
        probs, routing_map = original(self, *args, **options)
        maps.append(routing_map.clone())
        return probs, routing_map

    return forward


def train_plans(folder):
    from megatron.core.transformer.moe.router import TopKRouter

    from mindspeed_train import loop

    found = {}
    for name, flags in PLANS.items():
        maps = []
        log_flags = ("--moe-load-log", f"{folder}/loads.jsonl") if name == "dedup" else ()
        with (
            patch.object(TopKRouter, "forward", routed(maps, TopKRouter.forward)),
            activate(training_flags((*ONE_CALL, *flags, *log_flags), 1), host="standalone") as session,
        ):
            run = loop.setup(session)
            with count_communication() as log:
                session.call("train_step", run=run)
            calls = [(call.group, call.operation, call.sent_bytes) for call in log.calls]
            loop.teardown(session)
        found[name] = calls, maps
    return found


def train_crowded():
    from recorded_steps import recorded

    return {
        name: recorded((*ONE_CALL, *PLANS[name], "--use-distributed-optimizer"), steps=2, crowded=True)
        for name in ("flat", "dedup", "gather")
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("loads")


@pytest.fixture(scope="module")
def ranks(folder):
    return run_world(train_plans, RANKS, str(folder))


def sent(ranks, name, me, group, operation):
    calls, _ = ranks[me][name]
    return sum(size for place, kind, size in calls if place == group and kind == operation)


def digits(routing_map, parts):
    """Return bool [tokens, parts]: which parts of the experts a token goes to."""
    return routing_map.view(routing_map.shape[0], parts, -1).any(-1)


def exchanged_rows(ranks, name, parts, held, prefix=lambda rank, digit: digit):
    """Return rows and probabilities from each rank to each digit, for ranks that hold tokens of ``held``."""
    rows, probs = {}, {}
    for rank in range(RANKS):
        maps = torch.cat([ranks[source][name][1][0] for source in held(rank)])
        for digit in range(2 if parts == 2 or held(rank) != [rank] else RANKS):
            part = prefix(rank, digit)
            rows[rank, digit] = int(digits(maps, parts)[:, part].sum())
            probs[rank, digit] = int(maps.view(maps.shape[0], parts, -1)[:, part].sum())
    return rows, probs


def expected(rows, probs, me, mine, peers, mask):
    """Return the bytes that a rank sends in both directions of forward and backward."""
    away = [digit for digit in peers if digit != mine]
    out = sum(rows[me, digit] for digit in away), sum(probs[me, digit] for digit in away)
    back = [(rows[peer, mine], probs[peer, mine]) for digit, peer in peers.items() if digit != mine]
    into = sum(row for row, _ in back), sum(prob for _, prob in back)
    row = HIDDEN * 4
    return 2 * row * (out[0] + into[0]) + mask * out[0] + 4 * (out[1] + into[1])


def test_rows_that_travel_once_to_each_rank_send_the_bytes_of_the_formula(ranks):
    rows, probs = exchanged_rows(ranks, "zerc", RANKS, lambda rank: [rank])
    for me in range(RANKS):
        bytes_sent = sum(size for _, kind, size in ranks[me]["zerc"][0] if kind == "all_to_all_single")
        assert bytes_sent == expected(rows, probs, me, me, {rank: rank for rank in range(RANKS)}, 1)
        flat = sum(size for _, kind, size in ranks[me]["flat"][0] if kind == "all_to_all_single")
        assert bytes_sent < 0.8 * flat


def test_rows_that_travel_once_to_each_node_send_the_bytes_of_the_formula(ranks):
    rows, probs = exchanged_rows(ranks, "dedup", 2, lambda rank: [rank])
    for me in range(RANKS):
        peers = {node: 2 * node + me % 2 for node in range(2)}
        between = sent(ranks, "dedup", me, "moe.hop.1", "all_to_all_single")
        assert between == expected(rows, probs, me, me // 2, peers, 1)


@pytest.mark.parametrize("name", ["dedup", "gather"])
def test_inside_a_node_rows_travel_once_to_each_rank(ranks, name):
    rows, probs = exchanged_rows(
        ranks, name, RANKS, lambda rank: [rank % 2, rank % 2 + 2], lambda rank, digit: rank // 2 * 2 + digit
    )
    for me in range(RANKS):
        peers = {digit: me // 2 * 2 + digit for digit in range(2)}
        inside = sent(ranks, name, me, "moe.hop.2", "all_to_all_single")
        assert inside == expected(rows, probs, me, me % 2, peers, 1)


def test_gathered_rows_send_the_bytes_of_the_formula(ranks):
    tokens, row, probs = 32, HIDDEN * 4, CHOICES * 4
    for me in range(RANKS):
        gathered = sent(ranks, "gather", me, "moe.hop.1", "all_gather_into_tensor")
        scattered = sent(ranks, "gather", me, "moe.hop.1", "reduce_scatter_tensor")
        assert gathered == tokens * (2 * row + probs + EXPERTS // 8)
        assert scattered == tokens * (2 * row + probs)


def test_expected_bytes_of_gathered_rows_are_those_that_are_sent(ranks):
    sizes = Exchanged(tokens=32, choices=CHOICES, experts=EXPERTS, row_bytes=HIDDEN * 4)
    forward = sizes.expected_bytes(hops_of("gather", RANKS, 2), 2)
    row = HIDDEN * 4
    assert forward == sent(ranks, "gather", 0, "moe.hop.1", "all_gather_into_tensor") - 32 * row


@pytest.mark.thorough
def test_a_rank_without_rows_takes_part_and_trains_the_same():
    for rank in run_world(train_crowded, RANKS):
        flat = rank["flat"]
        for name in ("dedup", "gather"):
            ours = rank[name]
            assert ours.losses == pytest.approx(flat.losses, rel=1e-5)
            for parameter, value in ours.parameters.items():
                torch.testing.assert_close(value, flat.parameters[parameter], rtol=1e-4, atol=1e-5)


def test_recorded_loads_are_those_of_all_ranks(ranks, folder):
    _, record = map(json.loads, (folder / "loads.jsonl").read_text().splitlines())
    total = sum(rank["dedup"][1][0].sum(0) for rank in ranks)
    assert record["step"] == 1
    assert record["loads"] == {"1": total.tolist()}
    assert record["chosen"] == {"1": RANKS * 32 * CHOICES}


def test_masks_are_packed_by_eight():
    masks = torch.rand(5, 11) > 0.5
    assert packed(masks).shape == (5, 2)
    assert torch.equal(unpacked(packed(masks), 11), masks)


def test_sums_over_destinations_are_the_mirror_of_spreading():
    rows = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    index, counts = torch.tensor([0, 2, 0, 1]), [2, 2]
    assert torch.autograd.gradcheck(lambda x: spread(x, index, counts), (rows,))
    results = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gathered_sum(x, index, counts, 3), (results,))


def test_sums_of_half_precision_are_rounded_once():
    results = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    total = gathered_sum(results, torch.zeros(3, dtype=torch.int64), [1, 1, 1], 1)
    # Rounded after each addition it would stay 256.
    assert total.item() == 258


def test_hops_connect_ranks_that_differ_in_one_digit():
    hops = (Hop(2), Hop(3), Hop(2))
    assert hop_parts(hops, 0) == [[first, first + 6] for first in range(6)]
    assert hop_parts(hops, 1)[:3] == [[0, 2, 4], [1, 3, 5], [6, 8, 10]]
    assert hop_parts(hops, 2)[-1] == [10, 11]


def test_the_plan_is_chosen_by_bytes_between_nodes():
    sizes = Exchanged(tokens=4096, choices=8, experts=256, row_bytes=14336)
    assert cheapest(sizes, 64, 8) == "dedup"
    assert cheapest(sizes, 8, 8) == "flat"
    one, many = (Exchanged(tokens=4096, choices=choices, experts=64, row_bytes=14336) for choices in (2, 8))
    # All rows to three other nodes are fewer than eight choices, three quarters of them elsewhere.
    assert many.expected_bytes(hops_of("gather", 16, 4), 4) < many.expected_bytes((), 4)
    assert one.expected_bytes(hops_of("gather", 16, 4), 4) > one.expected_bytes((), 4)


def test_tokens_of_a_router_that_reaches_few_nodes_count_those_alone():
    assert Exchanged(tokens=1, choices=8, experts=256, row_bytes=1, reached=4).expected_parts(8) == 4


def test_another_package_contributes_a_plan(monkeypatch):
    class Contributed:
        def get(self, name):
            if name != "three-levels":
                raise ExtensionError(f"{name} is not installed")
            return lambda ranks, node_size: (
                Hop(2, gathers=True),
                Hop(ranks // 2 // node_size),
                Hop(node_size),
            )

    monkeypatch.setattr(comm_plans, "installed_extensions", lambda point: Contributed())
    assert hops_of("three-levels", 8, 2) == (Hop(2, gathers=True), Hop(2), Hop(2))
    with pytest.raises(ArgumentError, match="reaches 12 ranks"):
        hops_of("three-levels", 12, 4)
    with pytest.raises(ArgumentError, match="absent is not installed"):
        hops_of("absent", 8, 2)
    with pytest.raises(DeclarationError, match="is a function"):
        check_planner(3)


def plan(*flags):
    line = training_flags(flags, 1, INSTALLED)
    return prepare(line, platform="cpu", registry=INSTALLED, host="standalone").plan


ZERC = ("--moe-zerc",)
DEDUP = ("--moe-comm-plan", "dedup")
PADDED = ("--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity")
EXTENDED = (*MODEL, *TP2, "--moe-tp-extend-ep")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*MODEL, *ZERC), "--moe-zerc with --expert-model-parallel-size 1 has no communication to plan"),
        ((*MODEL, *EP4, *DEDUP, "--moe-node-size", "3"), "--moe-node-size 3 does not divide the 4 ranks"),
        ((*MODEL, *EP4, *DEDUP, "--moe-node-size", "0"), "--moe-node-size 0 does not divide the 4 ranks"),
        ((*MODEL, *EP4, *NODES), "--moe-node-size 2 needs a plan; add --moe-comm-plan dedup or auto"),
        ((*MODEL, *EP4, *ZERC, *NODES), "--moe-zerc sends rows to ranks, and --moe-node-size 2 to nodes"),
        ((*MODEL, *EP4, *ZERC, "--moe-comm-plan", "gather"), "--moe-zerc and --moe-comm-plan gather ask for"),
        ((*MODEL, *EP4, *ZERC, "--moe-hierarchical-alltoallv"), "ask for different plans"),
        ((*MODEL, *EP4, *DEDUP, "--moe-hierarchical-alltoallv"), "is --moe-comm-plan auto, not dedup"),
        ((*MODEL, *TP2, *EP2, *ZERC), "experts cut over 2 ranks: rows travel to whole experts"),
        ((*GATHERED, *EP2, *ZERC), "a plan stands in the place of the all-to-all"),
        ((*MODEL, *EP2, *ZERC, *PADDED), "rows that fill up an expert belong to no token"),
        ((*MODEL, *EP2, *ZERC, "--moe-permute-fusion"), "rows that travel once are not sorted by expert"),
        (ZERC, "without experts no token travels"),
        ((*EXTENDED, "--expert-tensor-parallel-size", "2"), "experts would be spread and cut over the same"),
        (
            (*EXTENDED, *EP4),
            "num_experts (4) must be divisible by tensor_model_parallel_size × expert_model_parallel_size",
        ),
        (("--moe-tp-extend-ep",), "without experts there is nothing to spread"),
        ((*MODEL, "--moe-load-log-interval", "2"), "--moe-load-log-interval 2 needs a file"),
        ((*MODEL, "--moe-load-log", "f", "--moe-load-log-interval", "0"), "0 is no number of steps"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(flags, message):
    with pytest.raises(PlanError) as error:
        plan(*flags)
    assert message in str(error.value)


def test_the_chosen_plan_and_its_bytes_are_noted():
    (note,) = plan(*CHOSEN, "--moe-hierarchical-alltoallv", *NODES).notes
    assert "follows the plan dedup on 2 nodes of 2 ranks" in str(note)
    assert all(f"{name} " in str(note) for name in ("flat", "gather", "dedup"))


def test_the_launchers_processes_are_the_ranks_of_a_node(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    (note,) = plan(*CHOSEN, *DEDUP).notes
    assert "on 2 nodes of 2 ranks" in str(note)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(PlanError, match="nodes of 3 processes do not divide the 4 ranks"):
        plan(*CHOSEN, *DEDUP)


def test_extended_experts_overlap_without_expert_parallelism_of_their_own():
    assert "moe-alltoall-overlap" in plan(*EXTENDED, *SHARED, *OVERLAP).names


def test_a_world_that_extended_experts_do_not_divide_is_refused():
    from mindspeed_core.validation import check

    found = check(training_flags(EXTENDED, 1, INSTALLED), world_size=3, platform="cpu", registry=INSTALLED)
    assert any("1 × 2 × 1 does not divide the world size 3" in str(problem) for problem in found.problems)


def test_a_program_of_ones_own_makes_its_groups_itself():
    from mindspeed_core.validation import check

    line = [*MODEL[2:], "--tensor-model-parallel-size", "2", "--sequence-parallel", "--moe-tp-extend-ep"]
    found = check(line, world_size=2, platform="cpu", host="library", registry=INSTALLED)
    assert any("your program makes the process groups" in str(problem) for problem in found.problems)


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
def test_every_host_takes_plans(host):
    made, _ = plan_for([*MODEL[2:], *EP2, *ZERC], platform="cpu", host=host, registry=INSTALLED)
    assert {"moe-comm-plan", "moe-core"} <= set(made.names)
