"""One step of one rank: its actions in order, on megatron-core's forward and backward steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor, forward_step
from torch import Tensor

from mindspeed_core.errors import UserError
from mindspeed_core.run import TensorSpec
from mindspeed_megatron.backward_pass import backward_pass
from mindspeed_megatron.schedule import announced
from mindspeed_pp.actions import (
    BACKWARD,
    FORWARD,
    GATHER,
    INPUT_GRADIENT,
    RECOMPUTE,
    REDUCE,
    SWAP_IN,
    SWAP_OUT,
    WEIGHT_GRADIENT,
    Action,
)
from mindspeed_pp.channels import Message
from mindspeed_pp.named import NamedAction
from mindspeed_pp.random_states import kept_random_state
from mindspeed_pp.reductions import Reductions
from mindspeed_pp.stage_backward import backward_of_several, or_zeros
from mindspeed_pp.step_parts import Parts, Place
from mindspeed_pp.swaps import Activations


@dataclass
class _Kept:
    """Tensors that a forward pass leaves for its backward pass."""

    received: list[Tensor | None]
    outputs: list[Tensor] = field(default_factory=list)
    random_state: Any = None


class Step:
    """The execution of one rank's list.

    Attributes:
        reports: what the loss function reported, by micro-batch in the order of the last stage.
        tokens: number of tokens that count in the loss, int32 scalar.
        position: index of the action that runs.
        alive: micro-batches whose activations are kept, chunk by chunk.
        most_alive: the largest value of ``alive``.
    """

    def __init__(self, parts: Parts) -> None:
        """Prepare a step."""
        self.p = parts
        self.reports: list[Any] = []
        self.tokens = torch.zeros([], dtype=torch.int, device=parts.device)
        self.position, self.alive, self.most_alive = 0, 0, 0
        self._order = parts.schedule.orders[parts.rank]
        self._kept: dict[Place, _Kept] = {}
        self._begun: set[int] = set()
        self._reductions = Reductions(parts)
        self._activations: Activations | None = None

    def run(self) -> None:
        """Execute the list."""
        if not self.p.forward_only:
            self._reductions.gather_at_begin()
        recorder = self.p.recorder
        if recorder is not None:
            recorder.start(self.p.pg.pp)
            self.p.mail.heard = recorder.arrived
        for position, action in enumerate(self._order):
            self.position = position
            self.p.announce(position)
            self.p.run.context.doing = f"item {position} of {len(self._order)} of the schedule, {action}"
            if recorder is not None:
                recorder.begin()
            if action.parts and self.p.combined is not None:
                self._both(*action.parts)
            else:
                for part in action.flat():
                    self._do.get(part.op, Step._named)(self, part)
            if recorder is not None:
                recorder.end(position)
            self.p.mail.reap()
        self.p.announce(len(self._order))
        self.p.run.context.doing = ""
        self.p.mail.flush()
        for batches in self.p.batches:
            if batches is not None:
                batches.finish(self.p.schedule.microbatches)
        if not self.p.forward_only:
            self._check_empty()

    def _forward(self, action: Action) -> None:
        place = action.stage, action.microbatch
        self._deliver(place, *self._computed(place, self._arrived(place)))

    def _arrived(self, place: Place) -> list[Tensor | None]:
        """Return the input of a forward pass, waiting for it."""
        stage, microbatch = place
        placement = self.p.schedule.placement
        if placement.is_first(stage):
            return [None]
        arrived = self.p.mail.receive(Message(FORWARD, *place), placement.ranks[stage - 1])
        specs = self.p.mail.specs(microbatch)
        return [self._needing_gradient(tensor, spec) for tensor, spec in zip(arrived, specs)]

    def _computed(self, place: Place, received: list[Tensor | None]) -> tuple[_Kept, list[Tensor]]:
        """Compute a forward pass; return what its backward pass needs, and its outputs."""
        kept = _Kept(received)
        again = self._comes_again(place)
        if again:
            kept.random_state = kept_random_state(self.p.run.session.platform)
        with torch.no_grad() if again else self._saving(place):
            outputs, tokens = self._pass(place, received, self.reports)
        self.tokens += tokens
        return kept, outputs

    def _comes_again(self, place: Place) -> bool:
        return place in self.p.schedule.recomputed and not self.p.forward_only

    def _deliver(self, place: Place, kept: _Kept, outputs: list[Tensor]) -> None:
        """Send outputs, and keep what the backward pass needs."""
        stage, microbatch = place
        placement = self.p.schedule.placement
        ranks = placement.ranks
        again = self._comes_again(place)
        if not self.p.forward_only:
            kept.outputs = [] if again else outputs
            self._kept[place] = kept
            if not again:
                self._count(1)
        if not placement.is_last(stage):
            kept_for_backward = not self.p.forward_only and not again
            freed = (lambda: self._free(outputs)) if kept_for_backward else (lambda: None)
            self.p.mail.send(Message(FORWARD, stage + 1, microbatch), ranks[stage + 1], outputs, freed)
        elif not self.p.forward_only and not again:
            self._free(outputs)

    def _saving(self, place: Place) -> contextlib.AbstractContextManager[None]:
        """Keep what autograd saves where the schedule sends it to the host before the backward pass."""
        if self.p.forward_only or self.p.schedule.swapped.get(place) != INPUT_GRADIENT:
            return contextlib.nullcontext()
        if self._activations is None:
            assert self.p.copies is not None
            self._activations = Activations(self.p.copies())
        chunk = self.p.schedule.placement.chunk(place[0])
        return self._activations.of(place, self.p.models[chunk].parameters())

    def _swap_out(self, action: Action) -> None:
        place = action.stage, action.microbatch
        if self.p.schedule.swapped[place] == WEIGHT_GRADIENT:
            assert self.p.copies is not None
            self.p.weight_gradients.go(place, self.p.copies())
        else:
            assert self._activations is not None
            self._activations.leave(place)
        self._count(-1)

    def _swap_in(self, action: Action) -> None:
        place = action.stage, action.microbatch
        if self.p.schedule.swapped[place] == WEIGHT_GRADIENT:
            self.p.weight_gradients.come(place)
        else:
            assert self._activations is not None
            self._activations.come(place)
        self._count(1)

    def _named(self, action: Action) -> None:
        chunk = self.p.schedule.placement.chunk(action.stage)
        model = self.p.models[chunk]
        self.p.named[action.op](
            NamedAction(self.p.run, self.p.schedule, action.stage, action.microbatch, model)
        )

    def _both(self, ahead: Action, behind: Action) -> None:
        """Run a forward and a backward pass side by side, between what they wait for and what they send."""
        assert self.p.combined is not None
        place, back = (ahead.stage, ahead.microbatch), (behind.stage, behind.microbatch)
        if place == back:
            self._forward(ahead)
            self._backward(behind)
            return
        received, gradients = self._arrived(place), self._gradients(back)
        made: list[tuple[_Kept, list[Tensor]]] = []
        later: list[Callable[[], None]] = []
        self.p.combined(
            lambda: made.append(self._computed(place, received)),
            lambda: self._backward(behind, gradients, later),
        )
        # In the order of the list, in which they are received.
        self._deliver(place, *made[0])
        for send in later:
            send()

    def _again(self, action: Action) -> None:
        place = action.stage, action.microbatch
        kept = self._kept[place]
        with kept.random_state():
            kept.outputs, _ = self._pass(place, kept.received, [])
        self._count(1)
        self._free(kept.outputs)

    def _pass(
        self, place: Place, received: list[Tensor | None], reports: list[Any]
    ) -> tuple[list[Tensor], Tensor]:
        stage, microbatch = place
        p, chunk = self.p, self.p.schedule.placement.chunk(stage)
        batches = p.batches[chunk if len(p.batches) > 1 else 0]
        if batches is not None:
            batches.at = microbatch
        vp_stage = chunk if len(p.models) > 1 else None
        first = chunk not in self._begun
        self._begun.add(chunk)
        if p.first_val_step is not None and p.forward_only:
            first = first and p.first_val_step
        function, samples = p.forward_step_func, None
        if p.weighing is not None:
            function = p.weighing.around(function, microbatch, p.config)
            samples = p.weighing.sizes[microbatch]
        with announced(p.run, vp_stage, microbatch, samples):
            output, tokens = forward_step(
                function,
                batches,
                p.models[chunk],
                # Data parallelism averages over the copies of the model.
                p.schedule.microbatches // p.schedule.placement.copies,
                received if len(received) > 1 else received[0],
                reports,
                p.config,
                p.pg.cp.size(),
                collect_non_loss_data=p.collect_non_loss_data,
                is_first_microbatch=first,
                current_microbatch=microbatch,
                vp_stage=vp_stage,
                is_last_stage=p.schedule.placement.is_last(stage),
            )
        while isinstance(output, (list, tuple)) and len(output) == 1:
            output = output[0]
        return list(output) if isinstance(output, (list, tuple)) else [output], tokens

    def _needing_gradient(self, tensor: Tensor, spec: TensorSpec) -> Tensor:
        return tensor.requires_grad_() if spec.requires_grad and not self.p.forward_only else tensor

    def _backward(
        self,
        action: Action,
        gradients: list[Tensor | None] | None = None,
        later: list[Callable[[], None]] | None = None,
    ) -> None:
        place = action.stage, action.microbatch
        chunk = self.p.schedule.placement.chunk(action.stage)
        store, reductions = self.p.weight_gradients, self._reductions
        if gradients is None:
            gradients = self._gradients(place)
        # Weights of a whole pass that is not the last one to give them are reported by a later action.
        parted = action.op == INPUT_GRADIENT or (
            reductions.last_backward[chunk] == place and reductions.last_weights[chunk] != place
        )
        store.leaves = place if parted else None
        try:
            with reductions.synchronized(chunk, reductions.last_backward[chunk] == place):
                self._to_input(place, gradients, later)
        finally:
            store.leaves = None
        if action.op == BACKWARD:
            if parted:
                self._weights(action)
            else:
                self._count(-1)
                self._reductions.reduce_if_last(chunk, place)

    def _gradients(self, place: Place) -> list[Tensor | None]:
        """Return the gradients of the outputs of a stage, waiting for them; none of the last one."""
        stage, microbatch = place
        placement = self.p.schedule.placement
        if placement.is_last(stage):
            return [None]
        message = Message(INPUT_GRADIENT, stage, microbatch)
        arrived = self.p.mail.receive(message, placement.ranks[stage + 1])
        self._wait_until_sent(self._kept[place].outputs)
        return list(arrived)

    def _to_input(
        self, place: Place, gradients: list[Tensor | None], later: list[Callable[[], None]] | None
    ) -> None:
        """Compute a backward pass; send what it makes at once, or leave that to ``later``."""
        stage, microbatch = place
        placement = self.p.schedule.placement
        ranks = placement.ranks
        kept = self._kept.pop(place)
        if self.p.weighing is not None:
            self.p.weighing.scale_further_losses(
                microbatch, self.p.config, self.p.pg.cp.size(), self.p.device
            )
        if len(kept.outputs) == 1 and len(kept.received) == 1:
            made = [backward_pass(kept.received[0], kept.outputs[0], gradients[0], self.p.config)]
        else:
            specs = self.p.mail.specs(microbatch)
            made = backward_of_several(kept.received, kept.outputs, gradients, specs, self.p.config)
        if not placement.is_first(stage):
            message = Message(INPUT_GRADIENT, stage - 1, microbatch)
            sent = [or_zeros(g, x) for g, x in zip(made, kept.received) if x is not None and x.requires_grad]
            send = partial(self.p.mail.send, message, ranks[stage - 1], sent, lambda: None)
            if later is None:
                send()
            else:
                later.append(send)

    def _weights(self, action: Action) -> None:
        place = action.stage, action.microbatch
        chunk = self.p.schedule.placement.chunk(action.stage)
        with self._reductions.synchronized(chunk, self._reductions.last_weights[chunk] == place):
            self.p.weight_gradients.run(place)
        self._count(-1)
        self._reductions.reduce_if_last(chunk, place)

    def _free(self, outputs: list[Tensor]) -> None:
        if len(outputs) == 1:
            deallocate_output_tensor(outputs[0], self.p.config.deallocate_pipeline_outputs)

    def _wait_until_sent(self, outputs: list[Tensor]) -> None:
        """Let an output be free before its backward pass: its gradient is here, so it has arrived."""
        if self.p.config.deallocate_pipeline_outputs and any(output.numel() > 1 for output in outputs):
            self.p.mail.flush()

    def _count(self, change: int) -> None:
        self.alive += change
        self.most_alive = max(self.most_alive, self.alive)

    def _check_empty(self) -> None:
        left = [*self.p.mail.left(), *(f"activations of {place}" for place in self._kept)]
        if self._activations is not None:
            left += [f"activations of {place} on the host" for place in self._activations.left()]
        left += [f"weight gradients of {place}" for place in self.p.weight_gradients.work]
        if left:
            raise RuntimeError(f"schedule {self.p.schedule.name}: {left[0]} is left at the end of the step")
        if self.p.schedule.splits and self._splits_here() and not self.p.weight_gradients.seen:
            raise UserError(
                f"--pipeline-schedule {self.p.schedule.name}: it computes gradients of weights apart, and no "
                "linear of this rank's chunks left one; use 1f1b or interleaved"
            )

    def _splits_here(self) -> bool:
        decoders = [
            m for model in self.p.models for m in model.modules() if hasattr(m, "add_weight_gradient")
        ]
        return bool(decoders) and any(a.op == INPUT_GRADIENT for a in self._order)

    _do: dict[str, Callable[[Step, Action], None]] = {
        FORWARD: _forward,
        RECOMPUTE: _again,
        INPUT_GRADIENT: _backward,
        BACKWARD: _backward,
        WEIGHT_GRADIENT: _weights,
        REDUCE: lambda step, action: step._reductions.start_reduction(action.stage),
        GATHER: lambda step, action: step._reductions.start_gathering(action.stage),
        SWAP_OUT: _swap_out,
        SWAP_IN: _swap_in,
    }
