"""The declaration of routes that do not depend on scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement
from mindspeed_megatron.expert_notes import routes_by_sinkhorn
from mindspeed_moe.features.core import PLACED_ROUTER

_FLAG = "--fix-router"


class FixedRoutes(Feature):
    """Tokens go to experts in turn: evenly loaded experts for measurements."""

    name = "moe-fix-router"
    family = "moe"
    summary = "Route tokens to experts in turn, to measure with an even load"
    level = 0
    flags = (Flag(_FLAG, help="Route tokens to experts in turn, whatever their scores, for measurements."),)
    requires = (
        PLACED_ROUTER,
        Requirement(flag="--num-experts", reason="without experts there are no routes"),
    )
    conflicts = (
        Conflict(
            flag="--moe-router-enable-expert-bias",
            reason="the bias learns from routes that are not taken; drop one of the two",
        ),
        Conflict(
            flag="--moe-expert-capacity-factor",
            reason="experts that are evenly loaded drop nothing; drop one of the two",
        ),
        Conflict(
            flag="--moe-router-force-load-balancing",
            reason="both choose the routes; keep one of the two",
        ),
    )
    slots = ("router",)
    packages = ("megatron-core>=0.16",)
    docs = "mindspeed_moe:docs/moe-fix-router.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.proofs:FIXED_ROUTE_PROOFS")

    @classmethod
    def model_facts(cls, args: Any) -> Mapping[str, Any]:
        """Return that routes do not follow scores."""
        return {"fix_router": True}

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse a router whose probabilities belong to its own routes."""
        if routes_by_sinkhorn(args):
            return (
                f"{_FLAG} with --moe-router-load-balancing-type sinkhorn: both choose the routes; keep one "
                "of the two",
            )
        return ()

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return that the model does not learn its routes."""
        return (f"{_FLAG} is for measurements: no token goes to the experts that its scores choose",)
