"""Training steps on a rank, with the order of what a layer of experts does recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from megatron.core.transformer.moe.router import TopKRouter

from mindspeed_core.activation import activate
from mindspeed_megatron.instruments.communication import count_communication
from mindspeed_moe import experts, launch_wait, weight_gradients, zero_memory
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

WIDTHS = {32, 96}
"""Of experts: the narrow ones of the model of proofs, and wide ones."""
DIRECTIONS = {"forward": "F {}", "backward": "B {} dx", "activate_again": "B {} again"}
"""Event of a product, by who computes it; a layer that is recomputed goes forward in backward."""


@dataclass
class Recorded:
    """The result of a rank.

    Attributes:
        events: of the last step, in order.
        rows: rows that each rank sends to each, by exchange.
        kept: exchanges that hold a handle or a buffer after the step.
        sent: calls of this rank and bytes it sends, by operation.
        kept_bytes: that the routed experts keep for backward, weights and numbers of rows left out.
        metrics: means of all steps.
        losses: of each step.
        parameters: after the last step, by name.
    """

    events: list[str] = field(default_factory=list)
    rows: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    kept: int = 0
    sent: dict[str, tuple[int, float]] = field(default_factory=dict)
    kept_bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def to_the_first_two(original):
    """Route every token to experts 0 and 1, which are on the first of two ranks."""

    def forward(self, *args, **options):
        probs, routing_map = original(self, *args, **options)
        mask = torch.zeros_like(routing_map)
        mask[:, :2] = True
        return probs.sum(-1, keepdim=True) * mask / 2, mask

    return forward


def recorded(flags, *, steps=1, crowded=False) -> Recorded:
    """Train some steps, and record the last one.

    Args:
        flags: beside those of the small model of proofs.
        steps: how many.
        crowded: all tokens go to the experts of the first rank.
    """
    found = Recorded()
    with ExitStack() as stack:
        if crowded:
            stack.enter_context(patch.object(TopKRouter, "forward", to_the_first_two(TopKRouter.forward)))
        session = stack.enter_context(activate(training_flags(flags, steps), host="standalone"))
        run = loop.setup(session)
        for step in range(steps):
            last = step == steps - 1
            with recorder(found) if last else ExitStack(), count_communication() as log:
                result = session.call("train_step", run=run)
            found.losses.append(result.losses["lm loss"])
            operations = {call.operation for call in log.calls}
            found.sent = {name: (log.count(name), log.sent_bytes(name)) for name in operations}
        found.metrics = {name: value / count for name, (_, value, count) in run.metrics.local().items()}
        for chunk in run.model:
            for name, parameter in chunk.named_parameters():
                found.parameters[name] = parameter.detach().clone()
        loop.teardown(session)
    return found


@contextmanager
def recorder(found: Recorded) -> Iterator[None]:
    exchanges, directions = [], {}
    start, finish = launch_wait.Exchange.start, launch_wait.Exchange.finish
    init = launch_wait.AllToAll.__init__
    product, compute = zero_memory.grouped_matmul, weight_gradients.LaterGradient.compute
    shared = experts.SharedExpertHalves.forward
    routed = experts.LaterGroupedExperts.forward

    def new_init(self, name, group, received, sent):
        init(self, name, group, received, sent)
        found.rows.append((name, list(received), list(sent)))

    def new_start(self, rows, *, mirrored: bool):
        exchanges.append(self)
        directions[self] = "B" if mirrored else "F"
        found.events.append(f"{directions[self]} {self.name} launch")
        return start(self, rows, mirrored=mirrored)

    def new_finish(self):
        found.events.append(f"{directions[self]} {self.name} wait")
        return finish(self)

    def new_product(rows, weight, ends):
        name = "gmm2" if WIDTHS & set(weight.shape) else "gmm1"
        direction = DIRECTIONS[sys._getframe(1).f_code.co_name].format(name)
        found.events.append(direction)
        return product(rows, weight, ends)

    def new_routed(self, *args, **options):
        weights = {weight.untyped_storage().data_ptr() for weight in self.parameters()}
        storages = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if tensor.is_floating_point() and storage.data_ptr() not in weights and tensor.numel():
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = routed(self, *args, **options)
        found.kept_bytes = sum(storages.values())
        return result

    def new_compute(self):
        name = "gmm1" if self._work.shape[1] == 64 else "gmm2"
        result = compute(self)
        found.events.append(f"B {name} dW")
        return result

    def new_shared(self, hidden_states, gate_input=None, half=0):
        found.events.append(f"F shared fc{half}")
        result = shared(self, hidden_states, gate_input, half)
        if result.requires_grad:
            result.register_hook(lambda gradient: found.events.append(f"B shared fc{half}"))
        return result

    with (
        patch.object(launch_wait.AllToAll, "__init__", new_init),
        patch.object(launch_wait.Exchange, "start", new_start),
        patch.object(launch_wait.Exchange, "finish", new_finish),
        patch.object(zero_memory, "grouped_matmul", new_product),
        patch.object(weight_gradients.LaterGradient, "compute", new_compute),
        patch.object(experts.SharedExpertHalves, "forward", new_shared),
        patch.object(experts.LaterGroupedExperts, "forward", new_routed),
    ):
        yield
    found.kept = sum(bool(exchange._work or exchange._buffers) for exchange in exchanges)
