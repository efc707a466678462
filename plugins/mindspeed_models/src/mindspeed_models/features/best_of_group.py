"""The declaration of a choice of groups of experts by their best expert (DeepSeek-V2)."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import Conflict, Feature, Flag, Requirement, Resume, Scenario, hookimpl

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_FLAG = "--moe-router-best-of-group"
_MODEL = (
    *("--adam-eps", "1e-3", "--swiglu", "--disable-bias-linear", "--num-layers", "2"),
    *("--num-experts", "8", "--moe-router-topk", "4", "--moe-ffn-hidden-size", "32"),
    *("--moe-router-num-groups", "4", "--moe-router-group-topk", "2", "--moe-router-pre-softmax"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", "0.01", _FLAG),
)
_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_EP2 = ("--expert-model-parallel-size", "2")
_ALONE: dict[str, Any] = {
    "baseline": _MODEL,
    "baseline_world_size": 1,
    "world_size": 2,
    "same_feature": True,
    "tolerance": 5e-5,
}
PROOFS = (
    Scenario("tp2-sp", flags=(*_MODEL, *_TP2), **_ALONE),
    Scenario("ep2", flags=(*_MODEL, *_EP2), **_ALONE),
    Scenario("resume-tp2", flags=_MODEL, tolerance=5e-5, resume=Resume(flags=(*_MODEL, *_TP2), world_size=2)),
)


class BestOfGroup(Feature):
    """Groups of experts are ranked by their best expert."""

    name = "best-of-group"
    family = "models"
    summary = "Rank groups of experts by their best expert, not by a sum (DeepSeek-V2)"
    flags = (
        Flag(
            _FLAG,
            changes_training=True,
            help="With --moe-router-num-groups: rank groups of experts by their best expert (DeepSeek-V2).",
        ),
    )
    requires = (
        Requirement(
            flag="--moe-router-num-groups",
            reason="it says how many groups there are",
            remedy="add --moe-router-num-groups and --moe-router-group-topk, or drop the flag",
        ),
        Requirement(
            flag="--moe-router-group-topk",
            reason="it says of how many groups a token's experts are",
            remedy="add --moe-router-group-topk, or drop the flag",
        ),
    )
    conflicts = (
        Conflict(flag="--moe-router-fusion", reason="its kernel ranks groups by a sum; drop one of the two"),
        Conflict(
            flag="--moe-enable-routing-replay",
            reason="it repeats a choice that was made before; drop one of the two",
        ),
        Conflict(
            feature="moe-deepspeed", reason="its router chooses experts by itself; drop --moe-model-type"
        ),
    )
    docs = "mindspeed_models:docs/best-of-group.md"
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = True
    verify = PROOFS

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse a balance that chooses experts by itself."""
        kinds = getattr(args, "moe_router_load_balancing_type", None) or ()
        if "sinkhorn" in ((kinds,) if isinstance(kinds, str) else kinds):
            return [
                f"{_FLAG}: --moe-router-load-balancing-type sinkhorn chooses experts without groups; use "
                "aux_loss or none"
            ]
        return []

    @classmethod
    def model_facts(cls, args: Any) -> Mapping[str, Any]:
        """Return by what groups are ranked."""
        return {"moe_router_group_rank": "best expert"}

    @hookimpl(wrapper=True, tryfirst=True)
    def build_layer_spec(self, session: Session) -> Generator[None, Any, Any]:
        """Change the choice of whatever router stands there."""
        spec = yield
        from mindspeed_models.heads.best_of_group import place_choice

        return place_choice(session, spec, self.name)
