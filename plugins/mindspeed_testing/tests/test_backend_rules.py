"""Rules of HCCL and NCCL on the lagging device, for calls as process groups get them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mindspeed_megatron.backend_contracts import BackendRefusal
from mindspeed_megatron.backend_contracts.hccl import HCCL
from mindspeed_megatron.backend_contracts.nccl import NCCL
from mindspeed_testing.lagging.backend_rules import rules_of
from mindspeed_testing.lagging.communication import Call

RULE = rules_of((HCCL["910B"], NCCL))
TP, GLOO, ALONE = (
    SimpleNamespace(size=lambda size=size: size, group_desc=name)
    for size, name in ((2, "TENSOR"), (2, "DATA_PARALLEL_GROUP_GLOO"), (1, "ALONE"))
)
WIDE = torch.ones(4, dtype=torch.float64)
BETWEEN_NUMBERS = torch.frombuffer(bytearray(10), dtype=torch.float32, count=2, offset=2)
SUM, BAND = dist.AllreduceOptions(), dist.AllreduceOptions()
BAND.reduceOp = dist.ReduceOp.BAND


def call(operation, *arguments, group=TP):
    return Call(operation, group, (), (), arguments, {})


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (call("allreduce", [WIDE], SUM), "float64"),
        (call("allreduce", [torch.ones(2, dtype=torch.int32)], BAND), "no reduction BAND"),
        (call("broadcast", [torch.ones(2, 2).t()], None), "not contiguous"),
        (call("allreduce", [BETWEEN_NUMBERS], SUM), "begins 2 bytes behind"),
        (call("_allgather_base", torch.ones(5), torch.ones(2)), "has 5 numbers"),
        (call("allgather", [[torch.ones(2)]], [torch.ones(2)]), "1 tensors for 2 ranks"),
        (call("alltoall_base", torch.ones(4), torch.ones(4), [1, 2], [2, 2]), "add up to 3"),
        (call("recv_anysource", [torch.ones(2)], 0), "give src"),
        (
            call(
                "reduce_scatter_tensor_coalesced",
                [torch.ones(2), torch.ones(2)],
                [torch.ones(4), torch.ones(5)],
            ),
            "has 5 numbers",
        ),
    ],
)
def test_what_a_device_s_backend_refuses_is_refused(refused, words):
    with pytest.raises(BackendRefusal, match=words):
        RULE(refused)


@pytest.mark.parametrize(
    "taken",
    [
        call("allreduce", [torch.ones(4)], SUM),
        call("alltoall_base", torch.ones(4), torch.ones(4), [0, 4], [4, 0]),
        call("alltoall_base", torch.ones(4), torch.ones(4), [], []),
        call("alltoall_base", torch.ones(4), torch.ones(4), np.array([0, 4]), np.array([4, 0])),
        call("barrier", None),
        call("allreduce", [WIDE], SUM, group=GLOO),
        call("allreduce", [WIDE], SUM, group=ALONE),
    ],
)
def test_what_it_takes_passes(taken):
    RULE(taken)
