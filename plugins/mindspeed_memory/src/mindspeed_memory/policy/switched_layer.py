"""A transformer layer that runs in one of several forms, chosen anew for each forward pass.

What runs in backward is what the forward pass prepared: a form may change between two micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from mindspeed_memory.policy.costs import ACTIVATION, ATTENTION, FEED_FORWARD, NOTHING, SWAP, WHOLE
from mindspeed_memory.recompute.activation import recomputing
from mindspeed_memory.recompute.layers import PlacedLayer
from mindspeed_memory.recompute.modules import checkpointed

if TYPE_CHECKING:
    from mindspeed_core.session import Session
    from mindspeed_memory.saved.engine import SavedTensors

Forward = Callable[..., Any]
Run = Callable[["SwitchedLayer", Forward, "Tensor | None"], Any]


class SwitchedLayer:
    """A layer and the form in which it runs.

    Attributes:
        placed: the layer and where it is.
        kind: layers of one kind cost the same.
        form: in which it runs; one of `forms`.
        forms: those that it has.
    """

    def __init__(
        self,
        session: Session,
        placed: PlacedLayer,
        owner: str,
        run: Run,
        engine: SavedTensors | None = None,
    ) -> None:
        """Change the layer.

        Args:
            session: takes the changes back when it closes.
            placed: the layer.
            owner: the feature.
            run: calls each forward pass of training, with the layer's input.
            engine: puts saved tensors on the host; without it the layer has no form that swaps.
        """
        self.placed = placed
        self.kind = _kind(placed.layer)
        self.form = WHOLE
        self._part: str | None = None
        layer: Any = placed.layer
        plain = layer.forward
        self._forwards: dict[str, Forward] = {WHOLE: checkpointed(layer), NOTHING: plain}
        parts = {FEED_FORWARD: layer.mlp, ATTENTION: layer.self_attention}
        for form, module in parts.items():
            self._forwards[form] = plain
            again = {form: checkpointed(module)}
            if form == FEED_FORWARD and isinstance(module, MLP) and type(module).forward is MLP.forward:
                self._forwards[ACTIVATION] = plain
                again[ACTIVATION] = recomputing(module)
            session.instances.set(owner, module, "forward", self._switched(module.forward, again))
        if engine is not None:
            self._forwards[SWAP] = engine.scope(plain)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (layer.training and torch.is_grad_enabled()) or _in_backward():
                return plain(*args, **kwargs)
            hidden_states = args[0] if args else kwargs.get("hidden_states")
            return run(self, lambda: self._run(*args, **kwargs), hidden_states)

        session.instances.set(owner, layer, "forward", forward)

    @property
    def forms(self) -> tuple[str, ...]:
        """Return the forms in which it can run."""
        return tuple(self._forwards)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._part = self.form
        try:
            return self._forwards[self.form](*args, **kwargs)
        finally:
            self._part = None

    def _switched(self, plain: Forward, again: dict[str, Forward]) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return again.get(self._part or "", plain)(*args, **kwargs)

        return forward


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _kind(layer: torch.nn.Module) -> str:
    """Return the same text for layers whose modules and parameters are alike."""
    modules = [(name, type(module).__qualname__) for name, module in layer.named_modules()]
    shapes = [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]
    return sha256(repr((modules, shapes)).encode()).hexdigest()[:12]
