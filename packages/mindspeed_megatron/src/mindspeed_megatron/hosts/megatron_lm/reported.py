"""The end of a program with one message, for an error that the user can put right.

Scripts of core_v0.18 and later run code of their own between the reading of the arguments and ``pretrain``:
every interception in between ends this way, and so do those within.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mindspeed_core.errors import UserError


@contextmanager
def reported() -> Iterator[None]:
    """End the program with one message for an error that the user can put right.

    Raises:
        SystemExit: in place of the error, after it was told.
    """
    try:
        yield
    except UserError as error:
        from mindspeed_megatron.launch.failure import report

        raise SystemExit(report(error)) from None
