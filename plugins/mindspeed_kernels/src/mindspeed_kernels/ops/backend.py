"""A backend: one implementation of an operator, where it can run and what it can serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed_kernels.call import Call
from mindspeed_kernels.contract import Contract, first_violation
from mindspeed_kernels.ops.availability import always
from mindspeed_kernels.ops.choice import STATE


def everything(call: Call) -> str:
    """Return no reason: every call that keeps the contracts is supported."""
    return ""


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator.

    Attributes:
        operator: name of the operator.
        name: unique among the operator's backends.
        function: the implementation, with the signature of the operator's reference.
        devices: types of the devices it runs on, ``("*",)`` for all.
        priority: the highest one that can serve is chosen; references have -100.
        available: why it cannot run in this process; empty when it can.
        supports: why it cannot serve a `Call`, empty when it can; may look at nothing but what the
            operator's key holds: device, dtypes, ranks, and texts and switches.
        contract: its limits besides the operator's contract. Automatic choice passes over a backend whose
            limits a call exceeds.
        deterministic: the same bits on every run.
        differentiable: False: calls with a tensor that requires grad are refused instead of answered with a
            result that autograd does not follow.
        dist: the package that brings it; filled in when it is added.
    """

    operator: str
    name: str
    function: Callable[..., Any]
    devices: tuple[str, ...] = ("*",)
    priority: int = 0
    available: Callable[[], str] = always
    supports: Callable[[Call], str] = everything
    contract: Contract = ()
    deterministic: bool = True
    differentiable: bool = True
    dist: str = ""

    def runs_on(self, device: str) -> bool:
        """Return whether it is meant for a type of device."""
        return device in self.devices or "*" in self.devices

    def refusal(self, call: Call) -> str:
        """Return why it cannot serve a call; empty when it can."""
        if not self.runs_on(call.device):
            return f"it runs on {', '.join(self.devices)}, the tensors are on {call.device}"
        if STATE.deterministic and not self.deterministic:
            return "it is not deterministic, and deterministic operators were asked for"
        reason = self.available() or self.supports(call)
        if reason:
            return reason
        violation = first_violation(self.contract, call)
        return "" if violation is None else violation.message(self.operator, self.name)
