"""The extension points of layers of experts."""

from __future__ import annotations

from mindspeed_core.feature import ExtensionPoint

COMM_PLANS = ExtensionPoint(
    name="moe.comm_plans",
    group="mindspeed_moe.comm_plans",
    summary="functions from ranks of experts and ranks of a node to the hops of mindspeed_moe.comm_plans.Hop",
    check="mindspeed_moe.comm_plans:check_planner",
)
