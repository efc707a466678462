"""The common part of features with an engine of saved tensors, wherever and in whichever form these wait."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_core.feature import Feature, hookimpl

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session


class SavingFeature(Feature):
    """Leaves parameters to their buffers, and tells the engine of each pass of a micro-batch."""

    family = "memory"
    places_modules = True
    deterministic = True
    affects_checkpoint = False

    _engine: Any = None
    _does: ClassVar[str] = "swap"
    _smallest: ClassVar[str] = "--swap-min-bytes"
    """The flag below which tensors stay."""
    _is_checked = False

    @hookimpl(wrapper=True)
    def wrap_ddp(self, session: Session) -> Generator[None, Any, Any]:
        """Leave parameters as they are, in the buffers of data parallelism and in backward too."""
        from mindspeed_megatron.saved_weights import keep_saved_weights

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

    def _check_use(self, run: Run, nbytes: int) -> None:
        """Refuse to go on where the first step left nothing to do. Collective over all ranks.

        Args:
            run: the run in progress.
            nbytes: that this rank has put away in the step.

        Raises:
            UserError: no rank put anything away, and what the modules save is dropped and computed again.
        """
        from mindspeed_core.errors import UserError
        from mindspeed_core.runtime.gather import all_gather_values

        if self._is_checked or run.session.platform.dry_run:
            return
        self._is_checked = True
        engine, flag = self._engine, self.flags[0].name
        found = all_gather_values((nbytes, engine.small, engine.dropped + engine.again))
        moved, small, again = (any(values) for values in zip(*found))
        if moved:
            return
        if again and not small:
            raise UserError(
                f"{flag}: nothing is left to {self._does}, since all that the chosen modules save is dropped "
                "and computed again; drop one of the two, or choose other modules"
            )
        if run.dist.rank == 0:
            smaller = f"; of what they save some is below {self._smallest}" if small else ""
            from logging import getLogger

            getLogger("mindspeed_core").warning(
                "%s: the chosen modules save nothing to %s%s", flag, self._does, smaller
            )
