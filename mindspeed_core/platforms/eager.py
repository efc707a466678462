"""Eager execution of ``torch.compile``d functions, also of those decorated long before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import OpeningSession


def hold_eager(session: OpeningSession, *, owner: str, reason: str) -> None:
    """Run compiled functions eagerly until the session closes."""
    import torch

    stances: list[Any] = []
    session.ledger.setting(
        "torch.compiler:set_stance",
        lambda: stances.append(torch.compiler.set_stance("force_eager")),
        lambda: stances.pop().__exit__(None, None, None),
        owner=owner,
        reason=reason,
    )
