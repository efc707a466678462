"""Measurement of what the forms of layers keep and take, over the first steps of a training.

One layer of each kind and chunk, the last one, stands for the others, and only in the first micro-batch of a
step: its backward pass comes first there, and needs at that moment whatever it kept. All others are computed
again as a whole, so that measuring takes little more memory than full recomputation does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from mindspeed_megatron.instruments.kept_state import state_bytes
from mindspeed_memory.policy.costs import (
    ACTIVATION,
    ATTENTION,
    FEED_FORWARD,
    NOTHING,
    SWAP,
    WHOLE,
    Costs,
    Measured,
)
from mindspeed_memory.policy.switched_layer import SwitchedLayer

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform, StepBytes
    from mindspeed_core.run import Run
    from mindspeed_memory.saved.host_copy import HostCopies

_TIMED = {"layer": "", "attention": "self_attention", "mlp": "mlp", "first": "mlp.linear_fc1"}
_TIMED["second"] = "mlp.linear_fc2"


@dataclass(frozen=True)
class Round:
    """The subject of one step of measuring.

    Attributes:
        form: of the measured layers.
        timed: time is measured, otherwise bytes: following tensors takes time itself.
    """

    form: str
    timed: bool = False


def rounds(steps: int, *, swaps: bool) -> tuple[Round, ...]:
    """Return the rounds of ``steps`` steps; forms for which too few are left are not measured.

    Args:
        steps: of measuring.
        swaps: layers can swap.
    """
    forms = (*((SWAP,) if swaps else ()), FEED_FORWARD, ATTENTION, ACTIVATION)
    needed = [Round(WHOLE), Round(WHOLE, timed=True), Round(NOTHING), *(Round(form) for form in forms)]
    # What is left measures again: the largest bytes and the shortest times count.
    again = [Round(WHOLE, timed=True), Round(NOTHING)]
    more = max(0, steps - len(needed))
    return tuple([*needed, *(again * more)[:more]][:steps])


class Profile:
    """The measurements of this rank."""

    def __init__(
        self,
        layers: Sequence[SwitchedLayer],
        platform: Platform,
        copies: HostCopies | None = None,
    ) -> None:
        """Choose the layers that are measured.

        Args:
            layers: of the rank.
            platform: its device.
            copies: of layers that swap.
        """
        self._layers, self._platform, self._copies = layers, platform, copies
        last = {(layer.placed.chunk, layer.kind): layer for layer in layers}
        self._measured_layers = {id(layer): key for key, layer in last.items()}
        self._last = last
        counts = Counter((layer.placed.chunk, layer.kind) for layer in layers)
        self._costs = {key: Costs(count) for key, count in counts.items()}
        self._live: Counter[int] = Counter()
        self._most: dict[int, int] = {layer.placed.chunk: 1 for layer in layers}
        self._events: dict[tuple[tuple[int, str], str], list[tuple[Any, Any]]] = defaultdict(list)
        self._times: dict[tuple[tuple[int, str], str], float] = {}
        self._resident = self._peak = self._head = 0
        self._in_head = self._ended = False
        self._final = layers[-1] if layers else None
        self._round: Round | None = None
        self._hooks: list[Any] = []
        self._tracker: StepBytes | None = None

    def paused(self) -> Any:
        """Return a context whose tensors are none of the device's."""
        return self._tracker.paused() if self._tracker is not None else nullcontext()

    def is_measured(self, layer: SwitchedLayer) -> bool:
        """Return whether a layer stands for others."""
        return id(layer) in self._measured_layers

    @contextmanager
    def step(self, run: Run, now: Round | None) -> Iterator[None]:
        """Measure the step of training that is done inside the context.

        Args:
            run: the run in progress.
            now: what is measured; None for the peak alone.
        """
        self._round = now
        self._resident = self._bytes_between_steps(run)
        self._peak = self._head = 0
        self._in_head = self._ended = False
        if now is not None and now.timed:
            self._hook()
            try:
                yield
            finally:
                self._unhook()
            return
        with self._platform.step_bytes() as self._tracker:
            try:
                yield
            finally:
                if not self._ended:
                    self.end_backward()
                self._tracker = None

    def end_backward(self) -> None:
        """Note the peak of forward and backward; what the update takes depends on no plan."""
        self._next_window()
        self._ended = True

    def _next_window(self, *, head: bool = False) -> None:
        """Note the peak of the part of the step that ends; the next one is the loss, or not."""
        if self._tracker is None or self._ended:
            return
        self._peak = max(self._peak, self._tracker.peak)
        if self._in_head:
            self._head = max(self._head, self._tracker.peak)
        self._in_head = head
        self._tracker.reset_peak()

    def run(self, layer: SwitchedLayer, forward: Callable[[], Any], hidden_states: Tensor | None) -> Any:
        """Run a layer and measure what it keeps."""
        self._count(layer, hidden_states)
        result = self._followed(layer, forward)
        if layer is self._final and self._tracker is not None:
            self._next_window(head=True)
            output = result[0] if isinstance(result, tuple) else result
            if output.requires_grad:
                output.register_hook(lambda gradient: self._next_window())
        return result

    def _followed(self, layer: SwitchedLayer, forward: Callable[[], Any]) -> Any:
        key = self._measured_layers.get(id(layer))
        if self._tracker is None or self._round is None or key is None or layer.form != self._round.form:
            return forward()
        before, moved = self._tracker.alive, self._copies.moved if self._copies else 0
        result = forward()
        costs, form = self._costs[key], layer.form
        kept = self._tracker.alive - before
        if self._copies is not None and form == SWAP:
            moving = self._copies.moved - moved
            costs.moving = max(costs.moving, moving)
            kept -= moving
        costs.nbytes[form] = max(costs.nbytes.get(form, 0), kept)
        return result

    def result(self, stage: int, needed: tuple[int, int, int]) -> Measured:
        """Return the measurements.

        Args:
            stage: pipeline stage of the rank.
            needed: as `needed` said of full recomputation.
        """
        for key, costs in self._costs.items():
            costs.seconds = self._seconds(key, costs)
        # A stage may have no layers at all.
        last = self._layers[-1].kind if self._layers else ""
        return Measured(stage, *needed, last, dict(self._most), self._costs)

    @property
    def needed(self) -> tuple[int, int, int]:
        """Return resident bytes of the last step, its peak in forward and backward, and that of the loss."""
        return self._resident, self._peak, self._head

    def _bytes_between_steps(self, run: Run) -> int:
        if self._platform.device_type == "cpu" or self._platform.dry_run:
            return sum(state_bytes(run).values())
        return self._platform.memory_allocated().bytes

    def _count(self, layer: SwitchedLayer, hidden_states: Tensor | None) -> None:
        """Count the micro-batches whose activations a chunk holds, at its first layer."""
        chunk = layer.placed.chunk
        if layer.placed.index or hidden_states is None:
            return
        self._live[chunk] += 1
        self._most[chunk] = max(self._most[chunk], self._live[chunk])
        if hidden_states.requires_grad:
            hidden_states.register_hook(lambda gradient: self._live.subtract([chunk]))

    def _seconds(self, key: tuple[int, str], costs: Costs) -> dict[str, float]:
        times = {part: self._times[key, part] for part in _TIMED if (key, part) in self._times}
        if not times:
            return {}
        found = {
            WHOLE: times["layer"],
            NOTHING: 0.0,
            FEED_FORWARD: times["mlp"],
            ATTENTION: times["attention"],
        }
        if "first" in times and "second" in times:
            found[ACTIVATION] = max(0.0, times["mlp"] - times["first"] - times["second"])
        if costs.moving:
            copy = self._copy_seconds(costs.moving)
            # A copy of a device with streams hides behind the layer's own pass.
            hidden = 0.0 if self._platform.device_type == "cpu" else times["layer"]
            found[SWAP] = 2 * max(0.0, copy - hidden)
        return found

    def _copy_seconds(self, nbytes: int) -> float:
        """Measure a copy to the host."""
        size = min(nbytes, 2**28)
        device = next(self._layers[0].placed.layer.parameters()).device
        on_device = torch.zeros(size, dtype=torch.uint8, device=device)
        here = self._platform.pinned_empty((size,), torch.uint8)
        least = float("inf")
        for _ in range(3):
            start, end = (self._platform.event(enable_timing=True) for _ in range(2))
            start.record()
            here.copy_(on_device, non_blocking=True)
            end.record()
            end.synchronize()
            least = min(least, start.elapsed_time(end) / 1e3)
        return least * nbytes / size

    def _hook(self) -> None:
        for key, layer in self._last.items():
            for part, path in _TIMED.items():
                module: Any = layer.placed.layer
                if path.startswith("mlp.") and not isinstance(module.mlp, MLP):
                    continue
                module = module.get_submodule(path)
                began: list[Any] = []
                self._hooks += [
                    module.register_forward_pre_hook(self._starting(began)),
                    module.register_forward_hook(self._ending(began, self._events[key, part])),
                ]

    def _starting(self, began: list[Any]) -> Callable[..., None]:
        def start(*_: Any) -> None:
            event = self._platform.event(enable_timing=True)
            event.record()
            began[:] = [event]

        return start

    def _ending(self, began: list[Any], events: list[tuple[Any, Any]]) -> Callable[..., None]:
        def end(*_: Any) -> None:
            event = self._platform.event(enable_timing=True)
            event.record()
            # What is computed again counts once, in forward.
            if torch._C._current_graph_task_id() == -1:
                events.append((began[0], event))

        return end

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._platform.synchronize()
        for where, events in self._events.items():
            if events:
                shortest = min(start.elapsed_time(end) for start, end in events) / 1e3
                self._times[where] = min(shortest, self._times.get(where, shortest))
        self._events.clear()
