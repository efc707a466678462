"""The declaration of losses that balance devices instead of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement
from mindspeed_megatron.expert_notes import routes_by_sinkhorn
from mindspeed_moe.features.core import PLACED_ROUTER
from mindspeed_moe.options import number_of_devices

_BALANCE, _COMMUNICATION = "--moe-device-level-aux-loss-coeff", "--moe-comm-aux-loss-coeff"
_COEFFICIENTS = {
    _BALANCE: "moe_device_level_aux_loss_coeff",
    _COMMUNICATION: "moe_comm_aux_loss_coeff",
}
_NOT_COUNTED = "routes are then not those of the scores; drop one of the two"


class DeviceLevelLosses(Feature):
    """Losses that balance what devices compute and what they are sent."""

    name = "moe-device-losses"
    family = "moe"
    summary = "Add DeepSeek-V2's device-level and communication balance losses"
    flags = (
        Flag(_BALANCE, type=float, default=0.0, help="Coefficient of the device-level balance loss."),
        Flag(
            _COMMUNICATION,
            type=float,
            default=0.0,
            help="Coefficient of the communication balance loss.",
        ),
    )
    requires = (
        PLACED_ROUTER,
        Requirement(flag="--num-experts", reason="without experts there is nothing to balance"),
    )
    conflicts = (
        Conflict(
            flag="--moe-expert-capacity-factor",
            reason="choices are counted before any is dropped; drop one of the two",
        ),
        Conflict(flag="--moe-router-force-load-balancing", reason=_NOT_COUNTED),
    )
    slots = ("router",)
    packages = ("megatron-core>=0.16",)
    docs = "mindspeed_moe:docs/moe-device-losses.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.proofs:DEVICE_LOSS_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether one of the coefficients is given, a wrong one included."""
        return any(getattr(args, dest, None) for dest in _COEFFICIENTS.values())

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse coefficients below zero, and devices that are none or that experts cannot be spread over."""
        given = {flag: getattr(args, dest) for flag, dest in _COEFFICIENTS.items() if getattr(args, dest)}
        found = [
            f"{flag} {value:g} would reward imbalance; use a number above 0, or drop it"
            for flag, value in given.items()
            if value < 0
        ]
        flag, value = next(iter(given.items()))
        devices, experts = number_of_devices(args), getattr(args, "num_experts", None) or 0
        if devices < 2:
            found.append(
                f"{flag} {value:g} has one device of experts, which is always balanced; use "
                "--expert-model-parallel-size 2 or more, or --moe-router-num-groups"
            )
        elif experts % devices:
            found.append(
                f"{flag} {value:g} needs as many experts on every device, which --num-experts {experts} has "
                f"not on {devices}; use a multiple"
            )
        if routes_by_sinkhorn(args):
            found.append(
                f"{flag} {value:g} with --moe-router-load-balancing-type sinkhorn: {_NOT_COUNTED}",
            )
        return found

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return that the layout decides what a device is, where it does."""
        if getattr(args, "moe_router_num_groups", None):
            return ()
        size = number_of_devices(args)
        return (
            f"losses of balance count {size} devices, those of --expert-model-parallel-size {size}: with "
            "another size another loss is trained; --moe-router-num-groups makes it a part of the model",
        )
