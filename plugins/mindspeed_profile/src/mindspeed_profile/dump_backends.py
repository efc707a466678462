"""The dump of a run: msprobe's where it is installed and fits, otherwise hooks of our own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from mindspeed_megatron.unwrap import unwrap
from mindspeed_profile.dump_options import DumpOptions
from mindspeed_profile.module_dump import ModuleDump

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from mindspeed_core.run import Run

logger = logging.getLogger(__name__)


class Dump(Protocol):
    """A dump of chosen steps."""

    def step(self, run: Run) -> AbstractContextManager[None]:
        """Dump the body, one training step, if it is chosen."""

    def close(self) -> None:
        """Write what is left."""


def make_dump(run: Run, options: DumpOptions) -> Dump:
    """Return msprobe's dump where a file of its form is given and msprobe can be imported, else our own.

    msprobe is refused by some versions of torch while it is imported: our own dump takes its place, and a
    warning says why.
    """
    if options.config is not None:
        try:
            debugger = import_module("msprobe.pytorch").PrecisionDebugger
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "msprobe":
                logger.warning("--npu-datadump: msprobe cannot be used (%s); statistics are our own", error)
        except Exception as error:
            logger.warning("--npu-datadump: msprobe cannot be used (%s); statistics are our own", error)
        else:
            return MsprobeDump(debugger(config_path=str(options.config)))
    return ModuleDump(run, options)


class MsprobeDump:
    """msprobe's ``PrecisionDebugger``, around every step; its file says which of them it dumps."""

    def __init__(self, debugger: Any) -> None:
        """Dump with this debugger."""
        self._debugger = debugger

    @contextmanager
    def step(self, run: Run) -> Iterator[None]:
        """Let msprobe watch the body."""
        models = [unwrap(chunk) for chunk in run.model]
        self._debugger.start(model=models[0] if len(models) == 1 else models)
        try:
            yield
        finally:
            self._debugger.stop()
            self._debugger.step()

    def close(self) -> None:
        """Do nothing: msprobe writes each step as it ends."""
