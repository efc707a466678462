"""The stage before anything heavy exists in the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_core.hooks.marker import Done, hookspec

if TYPE_CHECKING:
    from argparse import Namespace

    from mindspeed_core.session import Session

__all__ = ["prepare_process"]


@hookspec
def prepare_process(session: Session, args: Namespace) -> Done | Any:
    """Prepare the process before the distributed backend starts and before the host imports megatron.

    Environment variables are set with ``session.setenv(name, value)``, which restores them at close.
    megatron modules may already be imported when a session opens inside somebody else's program.
    """
