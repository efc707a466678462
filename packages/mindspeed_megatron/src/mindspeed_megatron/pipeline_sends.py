"""The last output that a rank sends in megatron-core's interleaved schedule, which never waits for it.

The schedule waits for an output before it sends another one, and drops the handle of the last. A backend that
gives memory of messages back when somebody waits for them, or not at all, relies on that wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_core.session import current

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_NEXT = "send_next"


class _Sent:
    """A message that is waited for once, by whoever comes first: gloo would wait for a second one."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def wait(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()


@dataclass
class _LastSent:
    """The last output that was sent in a session and that its schedule may not have waited for."""

    message: _Sent | None = None


def remembering_sends(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the exchange between stages that remembers what it sends without waiting.

    Args:
        original: ``P2PCommunicator.send_forward_recv_forward``.
    """

    def send_forward_recv_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        handles = found[1] if isinstance(found, tuple) else None
        if isinstance(handles, dict) and _NEXT in handles:
            handles[_NEXT] = current().state(_LastSent).message = _Sent(handles[_NEXT])
        return found

    return send_forward_recv_forward


def wait_for_sends(session: Session) -> None:
    """Wait for the last output that was sent, where the schedule did not."""
    last = session.state(_LastSent)
    if last.message is not None:
        last.message.wait()
        last.message = None


def forget_sends(session: Session) -> None:
    """Forget what a schedule has sent that failed: nobody may be there to receive it."""
    session.state(_LastSent).message = None
