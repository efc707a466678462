"""The common part of features with an engine of saved tensors, wherever and in whichever form these wait."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import Feature, hookimpl

if TYPE_CHECKING:
    from mindspeed_core.session import Session


class SavingFeature(Feature):
    """Leaves parameters to their buffers, and tells the engine of each pass of a micro-batch."""

    family = "memory"
    places_modules = True
    deterministic = True
    affects_checkpoint = False

    _engine: Any = None

    @hookimpl(wrapper=True)
    def wrap_ddp(self, session: Session) -> Generator[None, Any, Any]:
        """Leave parameters as they are, in the buffers of data parallelism and in backward too."""
        from mindspeed_core.megatron.saved_weights import keep_saved_weights

        chunks = yield
        keep_saved_weights(session, self.name, chunks)
        self._engine.keep(parameter for chunk in chunks for parameter in chunk.parameters())
        return chunks

    @hookimpl(wrapper=True)
    def forward_step(self) -> Generator[None, Any, Any]:
        """Begin and end the pass of a micro-batch through a chunk."""
        self._engine.begin()
        result = yield
        self._engine.end(result[0] if isinstance(result, tuple) else None)
        return result
