"""Options of communicators on stand-ins for NPUs: what HCCL is given for which group."""

from __future__ import annotations

from mindspeed_tp.group_options import hccl_options


def test_a_group_gets_the_size_and_the_mode_of_its_name():
    rule = hccl_options({"tp": 300, "tp2d.x": 64}, {"tp": 3, "dp": 2})
    assert rule("tp").hccl_config == {"hccl_buffer_size": 300, "hccl_op_expansion_mode": 3}
    assert rule("tp2d.x").hccl_config == {"hccl_buffer_size": 64}
    assert rule("dp").hccl_config == {"hccl_op_expansion_mode": 2}
    assert rule("pp") is None
