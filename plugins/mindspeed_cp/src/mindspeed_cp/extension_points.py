"""The extension points of context parallelism.

A package contributes through its ``pyproject.toml``::

    [project.entry-points."mindspeed_cp.planners"]
    acme = "acme_cp.planner:plan"

A planner's name is a value of ``--context-parallel-algo``; kernels are loaded when
attention first chooses one.
"""

from __future__ import annotations

from mindspeed_core.feature import ExtensionPoint

BLOCK_KERNELS = ExtensionPoint(
    name="cp.block_kernels",
    group="mindspeed_cp.block_kernels",
    summary="instances of mindspeed_cp.engine.kernels.BlockKernel: attention of some rows to some keys",
    check="mindspeed_cp.engine.kernels.choice:check_kernel",
)
PLANNERS = ExtensionPoint(
    name="cp.planners",
    group="mindspeed_cp.planners",
    summary="functions from the number of ranks and the arguments to a mindspeed_cp.engine.planners.Grid",
    check="mindspeed_cp.planner_choice:check_planner",
)
