"""The declaration of calls of experts that keep less where a rank gets many rows."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import isfinite
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, hookimpl
from mindspeed_moe.features.core import ORDERS_COMMUNICATION
from mindspeed_moe.features.shared_experts import shared_experts_on_a_stream
from mindspeed_moe.features.zero_memory import KEPT_APART, SENDING_LAYER, exposed_again, recomputed_already
from mindspeed_moe.options import LEVEL1

_FLAG = "--moe-adaptive-recompute-activation"
_SCALE = f"{_FLAG}-scale"


class AdaptiveRecompute(Feature):
    """A call that brings some rank many rows keeps less of them for backward."""

    name = "moe-adaptive-recompute"
    family = "moe"
    summary = "Recompute activations of experts that get many tokens"
    flags = (
        Flag(_FLAG, help="Recompute activations of experts in calls where a rank gets many tokens."),
        Flag(
            _SCALE,
            type=float,
            default=2.0,
            help=(
                "Tokens over the mean from which rows are resent in backward; from twice that, the "
                "first GEMM is recomputed too."
            ),
        ),
    )
    requires = SENDING_LAYER
    conflicts = (
        KEPT_APART,
        ORDERS_COMMUNICATION,
        Conflict(
            flag="--moe-model-type",
            one_of=("deepspeed_moe",),
            reason="experts with a capacity get no more rows than it; drop one of the two",
        ),
        Conflict(
            feature="moe-pipe-experts",
            reason="its experts keep the results of each part; drop one of the two",
        ),
    )
    docs = "mindspeed_moe:docs/moe-adaptive-recompute.md"
    fake_tensors = True
    deterministic = True
    tuning = {_FLAG: (False, True)}
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.adaptive_proofs:ADAPTIVE_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether it is switched on, or given a scale, which needs it."""
        return bool(args.moe_adaptive_recompute_activation) or _scale(args) != 2.0

    @classmethod
    def idle(cls, args: Any) -> str:
        """Return that every call keeps the least already."""
        everywhere = getattr(args, "moe_zero_memory_num_layers", None) is None
        if everywhere and getattr(args, "moe_zero_memory", None) == LEVEL1:
            return f"--moe-zero-memory {LEVEL1} keeps the least in every call already"
        return ""

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse scales that are none, and layers that are computed again as a whole."""
        scale = _scale(args)
        if not args.moe_adaptive_recompute_activation:
            return (f"{_SCALE} {scale:g} needs {_FLAG}; add it, or drop the scale",)
        found = [*recomputed_already(_FLAG, args), *shared_experts_on_a_stream(_FLAG, args)]
        if not (isfinite(scale) and scale > 0):
            found.append(f"{_SCALE} {scale:g} is no multiple of the mean of rows; use a number above 0, as 2")
        return found

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return that nothing hides what is sent again, where it is so."""
        return exposed_again(_FLAG, args)

    @hookimpl(wrapper=True)
    def train_step(self, run: Any) -> Generator[None, Any, Any]:
        """Count the calls that keep less."""
        from mindspeed_moe.crowded import Calls

        calls = run.session.state(Calls)
        calls.begin()
        result = yield
        run.metrics.add("moe calls", float(calls.all), "mean")
        run.metrics.add("moe crowded calls", float(calls.switched), "mean")
        return result


def _scale(args: Any) -> float:
    scale = args.moe_adaptive_recompute_activation_scale
    return 2.0 if scale is None else float(scale)
