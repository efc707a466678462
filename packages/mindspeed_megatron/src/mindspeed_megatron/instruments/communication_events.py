"""Communication of a training as events: several listeners hear of calls and waits, of which one log is kept.

The functions of ``torch.distributed`` are watched once for a session, from the first listener on until the
session closes: what several watch, each from when to when it likes, could not be restored exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from mindspeed_megatron.instruments.communication import Call, CommunicationListener, count_communication

if TYPE_CHECKING:
    from collections.abc import Callable

    from mindspeed_megatron.instruments.communication import CommunicationLog


class CommunicationEvents:
    """The events of one session: ``session.state(CommunicationEvents)``.

    Attributes:
        listeners: in the order in which they hear of a beginning; of an end they hear in the opposite one.
    """

    def __init__(self) -> None:
        """Watch nothing."""
        self.listeners: list[CommunicationListener] = []
        self._watching: ExitStack | None = None
        self._log: CommunicationLog | None = None

    @contextmanager
    def listening(
        self, listener: CommunicationListener, at_close: Callable[[Callable[[], object]], None]
    ) -> Iterator[None]:
        """Let a listener hear of this process's communication inside the context, one step usually.

        Args:
            listener: hears of calls and waits.
            at_close: ``session.at_close``, through which the functions are restored.
        """
        if self._watching is None:
            self._watching = ExitStack()
            self._log = self._watching.enter_context(count_communication(listener=self))
            at_close(self._stop)
        self._forget_calls()
        self.listeners.append(listener)
        try:
            yield
        finally:
            self.listeners.remove(listener)
            self._forget_calls()

    def call_made(self, call: Call) -> None:
        """Tell the listeners of a call."""
        for listener in self.listeners:
            listener.call_made(call)

    def wait_started(self, call: Call) -> None:
        """Tell the listeners that this rank waits."""
        for listener in self.listeners:
            listener.wait_started(call)

    def wait_stopped(self, call: Call) -> None:
        """Tell the listeners that it waits no more."""
        for listener in reversed(self.listeners):
            listener.wait_stopped(call)

    def _forget_calls(self) -> None:
        """Let go of the log's calls, which nobody reads; between steps no batch of them is open."""
        if self._log is not None and not self.listeners:
            self._log.calls.clear()
            self._log.groups.clear()

    def _stop(self) -> None:
        watching, self._watching, self._log = self._watching, None, None
        if watching is not None:
            watching.close()
