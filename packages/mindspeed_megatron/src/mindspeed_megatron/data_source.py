"""Data that a feature brings: slot ``data-source``, in place of the host's dataset files."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import ArgumentError, DataError

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


def reads_files(session: Session) -> bool:
    """Return whether the active feature that brings the data reads the files of ``--data-path`` for it.

    It does where it declares that flag.
    """
    feature = data_source(session)
    return bool(feature) and feature in session.claims("--data-path")


def check_only_source(session: Session, args: Namespace) -> None:
    """Refuse dataset files beside a feature that brings the data, and a feature that brings none.

    Files that the feature reads are no others.

    Raises:
        ArgumentError: names the feature and the flag.
    """
    feature = data_source(session)
    if not feature:
        return
    claimed = [name for name in _FLAGS if feature in session.claims("--" + name.replace("_", "-"))]
    given = next((name for name in _FLAGS if name not in claimed and getattr(args, name, None)), None)
    if given is not None:
        flag = "--" + given.replace("_", "-")
        value = getattr(args, given)
        shown = " ".join(value) if isinstance(value, list) else None if value is True else value
        reason = f"the feature {feature} brings the data"
        raise ArgumentError(flag, shown, reason, "drop it, or that feature's flag")
    if feature not in session.implementations("build_datasets"):
        reason = "it fills the slot data-source and does not implement the stage build_datasets"
        raise ArgumentError(f"feature {feature}", None, reason, "its author has to add the stage")


def check_kept_apart(session: Session, args: Namespace, sample: Mapping[str, Any]) -> None:
    """Refuse a micro-batch of several documents a row whose tokens would see those of another document.

    A data source that packs restarts positions at each document; without the two flags that keep documents
    apart a run trains across them, and nothing shows it.

    Args:
        session: the open session; only what a feature brings is looked at.
        args: the arguments.
        sample: with ``position_ids`` ``[b, s]`` on the CPU, and ``loss_mask`` ``[b, s]`` where it has one.

    Raises:
        DataError: names the feature and the flags.
    """
    feature, positions = data_source(session), sample.get("position_ids")
    lacking = [
        flag
        for flag, name in (
            ("--reset-attention-mask", "reset_attention_mask"),
            ("--reset-position-ids", "reset_position_ids"),
        )
        if not getattr(args, name, False)
    ]
    if not feature or not lacking or positions is None or positions.dim() != 2:
        return
    begins = positions[:, 1:] <= positions[:, :-1]
    if not bool(begins.any()):
        return
    mask = sample.get("loss_mask")
    if mask is not None:
        # Behind the last token that counts there is nothing but what fills up.
        counted = mask.flip(1).cumsum(1).flip(1) > 0
        begins = begins & counted[:, 1:]
    if bool(begins.any()):
        raise DataError(
            f"{feature}: a row of a micro-batch holds several documents (its positions begin again), and "
            f"their tokens would see one another; add {' '.join(lacking)}"
        )
