"""The contract of a communication backend, and the check of one call against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_core.errors import UserError
from mindspeed_megatron.backend_contracts.layouts import broken_layout
from mindspeed_megatron.backend_contracts.tensor_facts import CollectiveCall

REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"})
"""Operations that compute; all others move data."""


class BackendRefusal(UserError):
    """A call that a backend refuses, or answers with wrong numbers.

    Attributes:
        contract: name of the contract, ``hccl 910B``.
        call: the call.
        rule: the rule that it breaks.
    """

    def __init__(self, contract: str, call: CollectiveCall, rule: str, source: str, place: str) -> None:
        """Compose the message from contract, call, rule, its source and the line of the call."""
        self.contract, self.call, self.rule = contract, call, rule
        where = f"; called at {place}" if place else ""
        super().__init__(f"{contract} refuses {call}: {rule} ({source}){where}")


@dataclass(frozen=True)
class BackendContract:
    """The rules of one backend on one generation of devices.

    Attributes:
        backend: ``hccl`` or ``nccl``.
        generation: of the devices, ``910B``; empty where all are alike.
        moved: dtypes that travel.
        reduced: dtypes that are reduced, by reduction (``SUM``).
        widened: dtypes that ``all_reduce`` and ``reduce`` convert to int32 and back; scattering does not.
        integer_average: whether ``AVG`` divides integers.
        buffer_bytes: memory that a communicator takes on the device at its first call.
        pair_buffer_bytes: likewise, of the communicator of two ranks that send and receive one by one.
        sources: where each kind of rule was read: ``moved``, ``reduced``, ``contiguous``, ``aligned``,
            ``parts``, ``layouts``, ``objects``, ``order``, ``creation``, ``buffers``.
        assumed_for: a device that is not known and is held to these rules; empty where they are its own.
    """

    backend: str
    generation: str
    moved: frozenset[str]
    reduced: Mapping[str, frozenset[str]]
    widened: frozenset[str] = frozenset()
    integer_average: bool = True
    buffer_bytes: int = 0
    pair_buffer_bytes: int = 0
    sources: Mapping[str, str] = field(default_factory=dict)
    assumed_for: str = ""

    @property
    def name(self) -> str:
        """Return backend and generation: ``hccl 910B``; and for which unknown device it was assumed."""
        assumed = f" (assumed for {self.assumed_for}, which is not known)" if self.assumed_for else ""
        return f"{self.backend} {self.generation}".strip() + assumed

    def broken_rule(self, call: CollectiveCall) -> tuple[str, str] | None:
        """Return the rule that a call breaks and its source; None where it breaks none."""
        for tensor in call.tensors:
            if tensor.dtype not in self.moved:
                return f"{tensor.dtype} does not travel; {_listed(self.moved)} do", self.sources["moved"]
            if not tensor.contiguous:
                rule = f"the tensor of {tensor.argument} is not contiguous; call .contiguous() first"
                return rule, self.sources["contiguous"]
        broken = self._broken_by_reduction(call) if call.operation in REDUCTIONS else None
        if broken is None and call.operation == "all_to_all_single":
            broken = self._broken_by_parts(call)
        if broken is None:
            layout = broken_layout(call)
            broken = (layout, self.sources["layouts"]) if layout else None
        return broken

    def check(self, call: CollectiveCall, place: str = "") -> None:
        """Refuse a call that breaks a rule.

        Args:
            call: what is called.
            place: the line of code that calls, for the message.

        Raises:
            BackendRefusal: names the rule and where it was read.
        """
        broken = self.broken_rule(call)
        if broken is not None:
            raise BackendRefusal(self.name, call, *broken, place)

    def communicator_bytes(self, groups: int, pairs: int) -> int:
        """Return the device memory that communicators take for themselves.

        Args:
            groups: process groups with a call of their own.
            pairs: pairs of ranks with sends or receives outside of a batch.
        """
        return groups * self.buffer_bytes + pairs * self.pair_buffer_bytes

    def _broken_by_reduction(self, call: CollectiveCall) -> tuple[str, str] | None:
        source = self.sources["reduced"]
        if call.reduce_op not in self.reduced:
            return f"there is no reduction {call.reduce_op}; {_listed(self.reduced)} exist", source
        dtypes = self.reduced[call.reduce_op]
        widened = self.widened if call.operation in ("all_reduce", "reduce") else frozenset()
        for tensor in call.tensors:
            if tensor.behind and tensor.numbers:
                rule = (
                    f"the tensor of {tensor.argument} begins {tensor.behind} bytes behind a multiple of the "
                    f"size of a {tensor.dtype}; call .clone() first"
                )
                return rule, self.sources["aligned"]
            if tensor.dtype not in dtypes | widened:
                return f"{call.reduce_op} reduces {_listed(dtypes)}; convert before the call", source
            integer = "int" in tensor.dtype or tensor.dtype == "bool"
            if call.reduce_op == "AVG" and integer and not self.integer_average:
                return "AVG divides in place, which integers do not allow; sum and divide yourself", source
        return None

    def _broken_by_parts(self, call: CollectiveCall) -> tuple[str, str] | None:
        source = self.sources["parts"]
        for tensor in call.tensors:
            if not tensor.shape:
                return "tensors without dimensions are not split; use view(1)", source
            if not any(call.splits.values()) and tensor.shape[0] % call.size:
                rule = f"{tensor.shape[0]} rows are not divided by {call.size} ranks; give split sizes"
                return rule, source
        return None


def _listed(names: Sequence[str] | frozenset[str] | Mapping[str, object]) -> str:
    return ", ".join(sorted(names))
