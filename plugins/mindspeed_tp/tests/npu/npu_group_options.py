"""Options of communicators on stand-ins for NPUs: what HCCL is given for which group."""

from __future__ import annotations

import pytest

import mindspeed_core
from mindspeed_core.errors import UserError
from mindspeed_tp.group_options import check_names, hccl_options


def test_a_group_gets_the_size_and_the_mode_of_its_name():
    rule = hccl_options({"tp": 300, "tp2d.x": 64}, {"tp": 3, "dp": 2})
    assert rule("tp").hccl_config == {"hccl_buffer_size": 300, "hccl_op_expansion_mode": 3}
    assert rule("tp2d.x").hccl_config == {"hccl_buffer_size": 64}
    assert rule("dp").hccl_config == {"hccl_op_expansion_mode": 2}
    assert rule("pp") is None


def test_a_group_of_a_feature_that_nobody_creates_is_refused():
    with (
        mindspeed_core.activate([], platform="cpu") as session,
        pytest.raises(UserError, match=r"--hccl-group-buffer names tp2d\.z, which no active feature creates"),
    ):
        check_names(session, {"--hccl-group-buffer": {"tp": 3, "tp2d.z": 64}})
