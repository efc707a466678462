"""The identity of a run's training data: a digest of each dataset, in checkpoints and compared on resume.

A run that goes on with other files under the same names reads other samples at the place where it stopped,
and nothing in its losses says so. The digest covers the whole index and samples of the tokens, so that it
costs a moment for datasets of any size; ``mindspeed-train data check --full`` reads everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_core.errors import DataError
from mindspeed_core.terminal.foreign_text import shown
from mindspeed_train.data.files import bin_path, idx_path
from mindspeed_train.data.sources import Sources

_SAMPLES = 256
_SAMPLE_BYTES = 4096
_CHUNK = 1 << 22


@dataclass
class TrainingData:
    """The training data of a session.

    Attributes:
        record: of the datasets that this run reads, on rank 0; empty where they are no files.
        loaded: of the checkpoint that was resumed; empty where it has none.
        checkpoint: that checkpoint, for messages.
    """

    record: Mapping[str, Any] = field(default_factory=dict)
    loaded: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str = ""


def digest_of(prefix: str, *, full: bool = False) -> str:
    """Return the SHA-256 of a dataset: of its index, its size, and samples of its tokens or all of them.

    Raises:
        OSError: a file cannot be read.
    """
    found = hashlib.sha256()
    with idx_path(prefix).open("rb") as index:
        while chunk := index.read(_CHUNK):
            found.update(chunk)
    tokens = bin_path(prefix)
    size = tokens.stat().st_size
    found.update(size.to_bytes(8, "little"))
    with tokens.open("rb") as stream:
        if full:
            while chunk := stream.read(_CHUNK):
                found.update(chunk)
            return f"full:{found.hexdigest()}"
        last = max(size - _SAMPLE_BYTES, 0)
        for at in sorted({last * number // (_SAMPLES - 1) for number in range(_SAMPLES)}):
            stream.seek(at)
            found.update(stream.read(_SAMPLE_BYTES))
    return found.hexdigest()


def record_of(
    sources: Sources, split: str, pairs: Callable[[str], Sequence[str]] = lambda prefix: (prefix,)
) -> dict[str, Any]:
    """Return the record of the training data that flags name, in plain values.

    Args:
        sources: what the flags name.
        split: ``--split``.
        pairs: the prefixes of the files behind a name.
    """
    blend = sources.blend(0)
    if blend is None:
        return {}
    digests: dict[str, str] = {}
    for prefix in blend.prefixes:
        if prefix not in digests:
            digests[prefix] = "+".join(map(digest_of, pairs(prefix)))
    weights: Sequence[float | None] = blend.weights or [None] * len(blend.prefixes)
    record: dict[str, Any] = {
        "train": [
            {"prefix": prefix, "digest": digests[prefix], "weight": weight}
            for prefix, weight in zip(blend.prefixes, weights)
        ]
    }
    if sources.per_split is None:
        record["split"] = split
    return record


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return how training data differ from those of a checkpoint, one phrase each; names may differ."""
    before, now = saved.get("train", []), current.get("train", [])
    found = []
    if len(before) != len(now):
        found.append(f"{len(before)} datasets then, {len(now)} now")
    for was, new in zip(before, now):
        if was["digest"] != new["digest"]:
            name = "" if was["prefix"] == new["prefix"] else f" ({shown(was['prefix'])} then)"
            found.append(f"the content of {shown(new['prefix'])}{name}")
        elif was["weight"] != new["weight"]:
            found.append(f"the weight of {shown(new['prefix'])}, {was['weight']} then, {new['weight']} now")
    if saved.get("split") != current.get("split"):
        found.append(f"--split, {shown(saved.get('split'))} then, {shown(current.get('split'))} now")
    return found


def check_unchanged(data: TrainingData, *, allowed: bool) -> str:
    """Compare the data of a run with those of its checkpoint.

    Args:
        data: both records.
        allowed: the user wants other data.

    Returns:
        What differs, where that is allowed; else an empty text.

    Raises:
        DataError: they differ.
    """
    if not data.loaded or not data.record:
        return ""
    found = differences(data.loaded, data.record)
    if not found:
        return ""
    shown_ones = "; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")
    text = f"the training data are others than those of {data.checkpoint}: {shown_ones}"
    if allowed:
        return text
    raise DataError(
        f"{text}. The run would go on in the middle of other samples; name the former files, or add "
        "--allow-other-data to go on with these"
    )
