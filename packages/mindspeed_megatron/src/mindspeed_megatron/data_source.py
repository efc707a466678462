"""Data that a feature brings: slot ``data-source``, in place of the host's dataset files."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from mindspeed_core.errors import ArgumentError

if TYPE_CHECKING:
    from mindspeed_core.session import Session

SLOT = "data-source"
_FLAGS = (
    "mock_data data_path data_args_path train_data_path valid_data_path test_data_path "
    "per_split_data_args_path"
).split()


def data_source(session: Session) -> str:
    """Return the active feature that brings the data; an empty string where dataset files do."""
    return session.plan.slots.get(SLOT, "")


def check_only_source(session: Session, args: Namespace) -> None:
    """Refuse dataset files beside a feature that brings the data, and a feature that brings none.

    Raises:
        ArgumentError: names the feature and the flag.
    """
    feature = data_source(session)
    if not feature:
        return
    given = next((name for name in _FLAGS if getattr(args, name, None)), None)
    if given is not None:
        flag = "--" + given.replace("_", "-")
        value = getattr(args, given)
        shown = " ".join(value) if isinstance(value, list) else None if value is True else value
        reason = f"the feature {feature} brings the data"
        raise ArgumentError(flag, shown, reason, "drop it, or that feature's flag")
    if feature not in session.implementations("build_datasets"):
        reason = "it fills the slot data-source and does not implement the stage build_datasets"
        raise ArgumentError(f"feature {feature}", None, reason, "its author has to add the stage")
