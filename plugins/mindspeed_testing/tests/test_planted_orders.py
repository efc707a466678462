"""Faults of order planted into copies of real modules: the lagging device names each, with its line."""

import pytest

from mindspeed_testing import run_world
from mindspeed_testing.lagging.planting import PlantedFault
from mindspeed_testing.lagging.runs import Training, outcomes

SMALL_BATCH = ("--global-batch-size", "2")
LLAMA = (
    *("--num-layers", "3", "--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm"),
    *("--position-embedding-type", "rope", "--ffn-hidden-size", "128", "--use-flash-attn"),
)
SWAP = (*LLAMA, "--swap-attention", "--swap-min-bytes", "1024")
OPTIMIZER = (*LLAMA, "--swap-optimizer", "--swap-optimizer-times", "3")
PP2 = ("--pipeline-model-parallel-size", "2")
RING = ("--context-parallel-size", "2", "--use-flash-attn")
EXPERTS = (
    *("--num-layers", "2", "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32"),
    *("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"),
    *("--swiglu", "--disable-bias-linear", "--moe-grouped-gemm"),
)
COPY, TRANSFERS = "mindspeed_memory.saved.host_copy", "mindspeed_memory.optim.transfers"
READ, WRITTEN, FREED = "read without a wait", "written without a wait", "freed while in use"
DROPPED, UNRECORDED = "dropped without a wait", "event never recorded"

ONE_RANK = {
    "a copy to the host begins before its tensor is computed": (
        SWAP,
        PlantedFault(COPY, "copies.away.wait_stream(platform.current_stream())", "pass"),
        (READ, "host_copy.py"),
    ),
    "what came back is read before it is there": (
        SWAP,
        PlantedFault(COPY, "self._copies.platform.current_stream().wait_event(event)", "pass"),
        (READ, "host_copy.py"),
    ),
    "a window of the optimizer is updated before it is there": (
        OPTIMIZER,
        PlantedFault(TRANSFERS, "self._platform.current_stream().wait_event(staged.arrived)", "pass"),
        (READ, "transfers.py"),
    ),
    "an original goes while it is copied": (
        SWAP,
        PlantedFault(COPY, "self._copies.platform.current_stream().wait_event(self._gone)", "pass"),
        (FREED, "host_copy.py"),
    ),
    "a destination is written while its memory is in use": (
        SWAP,
        PlantedFault(COPY, "copies.back.wait_stream(platform.current_stream())", "pass"),
        (WRITTEN, "host_copy.py"),
    ),
    "a destination is replaced on the stream of the copy": (
        SWAP,
        PlantedFault(
            COPY,
            "            destination.copy_(self._host.view(self._dtype), non_blocking=True)",
            "            destination = destination.clone()\n"
            "            destination.copy_(self._host.view(self._dtype), non_blocking=True)",
        ),
        (FREED, "host_copy.py"),
    ),
    "a buffer takes a window while the one before leaves it": (
        OPTIMIZER,
        PlantedFault(TRANSFERS, "self._inward.wait_event(before.left)", "pass"),
        (WRITTEN, "transfers.py"),
    ),
    "a window leaves before it is updated": (
        OPTIMIZER,
        PlantedFault(TRANSFERS, "self._outward.wait_stream(self._platform.current_stream())", "pass"),
        (WRITTEN, "transfers.py"),
    ),
    "an event is waited for that nobody recorded": (
        SWAP,
        PlantedFault(COPY, "self._gone = copies.away.record_event()", "self._gone = platform.event()"),
        (UNRECORDED, "host_copy.py"),
    ),
}
TWO_RANKS = {
    "parts of a ring are read before they arrive": (
        RING,
        PlantedFault("mindspeed_cp.engine.ring", "                work.wait()", "                pass"),
        (READ, DROPPED, "ring.py"),
    ),
    "a handle of an exchange is dropped": (
        (*EXPERTS, "--moe-alltoall-overlap-comm"),
        PlantedFault("mindspeed_moe.launch_wait", "            self._work.wait()", "            pass"),
        (DROPPED, "launch_wait.py"),
    ),
    "messages between pipeline stages are read before they arrive": (
        (*PP2, "--pipeline-schedule", "zb-h1"),
        PlantedFault("mindspeed_pp.mail", "                work.wait()", "                pass"),
        (READ, "mail.py"),
    ),
}


def reports(cases, world_size):
    trainings = [Training((*SMALL_BATCH, *flags), fault=fault) for flags, fault, _ in cases.values()]
    ranks = run_world(outcomes, world_size, trainings, timeout=120)
    return dict(zip(cases, ("\n".join(one.error for one in of_ranks) for of_ranks in zip(*ranks))))


@pytest.fixture(scope="module")
def of_one_rank(asked_for):
    asked = asked_for("case")
    return reports({case: found for case, found in ONE_RANK.items() if case in asked}, 1)


@pytest.mark.parametrize("flags", [pytest.param(SWAP, id="swap"), pytest.param(OPTIMIZER, id="optimizer")])
def test_nothing_is_named_without_a_fault(flags):
    assert run_world(outcomes, 1, [Training((*SMALL_BATCH, *flags))])[0][0].error == ""


@pytest.mark.parametrize("case", ONE_RANK)
def test_a_planted_fault_is_named(of_one_rank, case):
    assert all(text in of_one_rank[case] for text in ONE_RANK[case][2]), of_one_rank[case] or "nothing found"


@pytest.mark.parametrize(
    "case",
    [case if n < 2 else pytest.param(case, marks=pytest.mark.thorough) for n, case in enumerate(TWO_RANKS)],
)
def test_a_planted_fault_between_ranks_is_named(case):
    # Messages that a faulty run leaves behind would be met by the next one.
    text = reports({case: TWO_RANKS[case]}, 2)[case]
    assert all(part in text for part in TWO_RANKS[case][2]), text or "nothing found"
