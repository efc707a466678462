"""The extension points of mindspeed-moe, for its declarations and for what calls contributions. No torch.

A package contributes through its ``pyproject.toml``::

    [project.entry-points."mindspeed_moe.comm_plans"]
    acme = "acme_routes:plan"

The name is a value of ``--moe-comm-plan``; the function is loaded where it is chosen.
It is called with the same numbers on every rank, and has to return the same hops on all of them: a rank with
others would wait for messages that nobody sends.

``mindspeed-features list --all`` names every extension point, and what is broken.
"""

from __future__ import annotations

from mindspeed_core.feature import ExtensionPoint

COMM_PLANS = ExtensionPoint(
    name="moe.comm_plans",
    group="mindspeed_moe.comm_plans",
    summary="functions from ranks of experts and ranks of a node to the hops of mindspeed_moe.comm_plans.Hop",
    check="mindspeed_moe.comm_plans:check_planner",
)
"""Hops of tokens between ranks of experts."""
