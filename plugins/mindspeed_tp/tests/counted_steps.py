"""Training steps on a rank, with its communication in the groups of tensor parallelism."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mindspeed_core.activation import activate
from mindspeed_core.hosts.standalone import loop
from mindspeed_core.instruments.communication import count_communication
from mindspeed_core.testing.model_flags import training_flags

TENSOR = ("TENSOR_MODEL_PARALLEL_GROUP", "tp2d.x", "tp2d.y", "tp.together")


@dataclass
class Counted:
    """The last step of a training.

    Attributes:
        calls: how many of each operation, in groups of tensor parallelism.
        received: elements of this rank's results that other ranks sent, by group.
        order: operations, groups and bytes in order.
        grad_norm: of the last step.
        loss: of the last step.
    """

    calls: Counter[str] = field(default_factory=Counter)
    received: dict[str, float] = field(default_factory=dict)
    order: list[tuple[str, str, int]] = field(default_factory=list)
    grad_norm: float = 0.0
    loss: float = 0.0


def counted(flags, *, steps=1) -> Counted:
    """Train some steps, and count what the last one communicates."""
    found = Counted()
    with activate(training_flags(flags, steps), host="standalone") as session:
        run = loop.setup(session)
        for step in range(steps):
            with count_communication() as log:
                result = session.call("train_step", run=run)
            if step == steps - 1:
                for call in log.calls:
                    if call.group in TENSOR:
                        found.calls[call.operation] += 1
                        found.received[call.group] = found.received.get(call.group, 0) + call.sent_bytes
                        found.order.append((call.operation, call.group, call.tensor_bytes))
        found.grad_norm, found.loss = result.grad_norm, result.losses["lm loss"]
        loop.teardown(session)
    return found
