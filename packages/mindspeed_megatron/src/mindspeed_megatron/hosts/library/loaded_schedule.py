"""Schedules that the caller's own code loads: groups of parameters obey the rule of the scheduler too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

from mindspeed_megatron.saved_schedule import Values, group_values, settle_groups

if TYPE_CHECKING:
    from mindspeed_core.session import Session

logger = logging.getLogger("mindspeed_core")
_OWNER = "loaded_schedule"


class LoadedSchedule:
    """Optimizer and scheduler of a library session, which its caller loads in either order."""

    def __init__(self) -> None:
        """Know neither."""
        self._optimizer: Any = None
        self._scheduler: Any = None
        self._own: Sequence[Values] = ()
        self._loaded = {"optimizer": False, "scheduler": False}

    def watch_optimizer(self, session: Session, optimizer: Any) -> None:
        """Remember what the caller's configuration gave each group of parameters."""
        self._optimizer, self._own = optimizer, group_values(optimizer)
        self._watch(session, optimizer, "optimizer")

    def watch_scheduler(self, session: Session, scheduler: Any) -> None:
        """Let the groups of parameters obey this scheduler once both are loaded."""
        self._scheduler = scheduler
        if self._optimizer is None:
            self.watch_optimizer(session, getattr(scheduler, "optimizer", None))
        self._watch(session, scheduler, "scheduler")

    def _watch(self, session: Session, owner: Any, name: str) -> None:
        plain: Callable[..., Any] | None = getattr(owner, "load_state_dict", None)
        self._loaded[name] = False
        if plain is None:
            return

        from mindspeed_megatron.optimizer_state import groups_told_apart

        def load_state_dict(_: Any, *positional: Any, **named: Any) -> Any:
            state = positional[0] if positional else next(iter(named.values()), None)
            with groups_told_apart(owner, state) if name == "optimizer" else nullcontext():
                result = plain(*positional, **named)
            self._loaded[name] = True
            if all(self._loaded.values()):
                self._loaded = dict.fromkeys(self._loaded, False)
                for note in settle_groups(self._optimizer, self._scheduler, self._own, "load_state_dict"):
                    logger.warning("mindspeed: %s", note)
            return result

        session.instances.set(_OWNER, owner, "load_state_dict", MethodType(load_state_dict, owner))
        describe: Callable[..., Any] | None = getattr(owner, "sharded_state_dict", None)
        if name == "optimizer" and describe is not None:
            session.instances.set(_OWNER, owner, "sharded_state_dict", MethodType(_apart(describe), owner))


def _apart(describe: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``sharded_state_dict`` that does not mix groups up when it loads the optimizer from itself."""

    from mindspeed_megatron.optimizer_state import groups_told_apart

    def sharded_state_dict(optimizer: Any, *positional: Any, **named: Any) -> Any:
        is_loading = named.get("is_loading", positional[1] if len(positional) > 1 else False)
        with groups_told_apart(optimizer) if is_loading else nullcontext():
            return describe(*positional, **named)

    return sharded_state_dict
