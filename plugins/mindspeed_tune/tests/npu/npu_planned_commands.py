"""Plans with the kernels of NPUs: torch_npu's own schemas and shape functions run."""

from __future__ import annotations

import pytest

from mindspeed_tune.driver import Ranks, records_of
from mindspeed_tune.launch_command import read_command
from mindspeed_tune.launch_plan import make_plan

COMMAND = (
    "mindspeed-train --fake-world-size 8 --mock-data --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 64 --vocab-size 256 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --bf16 --use-distributed-optimizer --micro-batch-size 2 --global-batch-size 16 "
    "--train-iters 2 --lr 1e-3 --attention-dropout 0 --tensor-model-parallel-size 2 --sequence-parallel "
    "--pipeline-model-parallel-size 2 --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu"
)


@pytest.fixture(scope="module")
def records():
    with Ranks(read_command(COMMAND.split(), {}), platform="fake-npu") as runner:
        return records_of(runner)


def test_a_launch_on_npus_holds_together(records):
    plan = make_plan(("train",), records)
    assert plan.ok
    assert plan.order.unchecked == ()
    assert plan.incomplete == {}
    assert [form for kind in plan.kinds for form in kind.forms if form.difference] == []


def test_one_mask_is_planned_for_all_layers_and_micro_batches(records):
    for record in (record for record in records if len(record.runs) > 1):
        held = record.runs[0].peak.modules["decoder.layers.*.self_attention.core_attention"]
        # While it is made, what it is the inverse of is there too.
        assert 2048 * 2048 <= held <= 2 * 2048 * 2048


def test_nothing_of_gloo_is_planned_on_npus(records):
    assert {record.backend.bytes for record in records} == {0.0}


def test_experts_on_npus_are_planned_with_the_stream_of_their_counts():
    flags = (
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-alltoall-overlap-comm"
    )
    with Ranks(read_command([*COMMAND.split(), *flags.split()], {}), platform="fake-npu") as runner:
        assert make_plan(("train",), records_of(runner)).ok
