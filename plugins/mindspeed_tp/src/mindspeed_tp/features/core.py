"""The declaration of planned linears, in which other features of this package work."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mindspeed_core.feature import Feature, Proofs, Requirement, hookimpl
from mindspeed_tp.features.formulas import DENSE
from mindspeed_tp.options import GRID, LINEARS, UNEVEN, linear_plans


class PlannedLinears(Feature):
    """Places linears whose communication follows a plan, once for every feature that changes the plan."""

    name = LINEARS
    family = "tp"
    summary = "Provide linear layers with planned communication for other features"
    replaces_roles = ("qkv", "proj", "fc1", "fc2")
    after = ("pp-weight-gradients",)
    docs = "mindspeed_tp:docs/tp-linear.md"
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    formulas = {"bytes_sent": DENSE}
    verify = Proofs("mindspeed_tp.features.proofs:LINEAR_PROOFS")

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Place the linears."""
        spec = yield
        from mindspeed_tp.placement import place_linears
        from mindspeed_tp.uneven.cut import Cuts

        asking = [feature for feature in session.plan.features if feature.name != self.name]
        names = session.plan.names
        asked_by = ", ".join(feature.name for feature in asking if feature.dist == DIST)
        cuts = Cuts.of(args) if UNEVEN in names else None
        plans = linear_plans(args, names)
        return place_linears(session, spec, plans, asked_by, grid=GRID in names, cuts=cuts)


DIST = "mindspeed-tp"
PLANNED = Requirement(
    feature=LINEARS, reason="it places the linears whose communication changes", implies=True
)
"""Of features that change the communication of linears."""
