"""The parts of a manifest, each with its type and range."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_train.checkpoint.fields import Fields

_HASH = re.compile(r"[0-9a-f]{64}\Z")


def files(root: Fields) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of each file, none of which lies outside."""
    listed = root.child("files")
    found = {}
    for name, entry in listed.content.items():
        known = isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int and entry[0] >= 0
        if not known or not isinstance(entry[1], str) or not _HASH.match(entry[1]):
            listed.refuse(name, entry, "a size and a SHA-256")
        if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).parts or "\0" in name:
            listed.refuse(name, name, "a file inside the checkpoint")
        found[name] = (entry[0], entry[1])
    return found


def plan(root: Fields) -> Mapping[str, Any]:
    """Return a plan whose fields that are read again have their types."""
    plan = root.child("plan", {})
    entries = plan.value("features", None)
    for entry in plan.items("features", dict) if entries is not None else ():
        feature = Fields(root.path, entry, "plan.features")
        feature.text("name")
        for name in ("version", "dist", "why"):
            if feature.has(name):
                feature.text(name)
        if feature.has("affects_checkpoint"):
            feature.truth("affects_checkpoint")
    if plan.has("slots"):
        texts(plan.child("slots"))
    if plan.has("digest"):
        plan.text("digest")
    return plan.content


def texts(inner: Fields) -> dict[str, str]:
    """Return fields that are all text."""
    return {name: inner.text(name) for name in inner.content}


def sizes(inner: Fields) -> dict[str, int]:
    """Return fields that are all sizes of a parallel dimension."""
    return {name: inner.integer(name, 1, 1 << 24) for name in inner.content}


def plain(inner: Fields) -> Mapping[str, Any]:
    """Return fields that are all numbers, switches or text."""
    for name, value in inner.content.items():
        if value is not None and not isinstance(value, (bool, int, float, str)):
            inner.refuse(name, value, "a number, a switch or text")
    return inner.content


def data(root: Fields) -> Mapping[str, Any]:
    """Return the identity of the training data."""
    record = root.child("data", {})
    if not record.content:
        return {}
    for entry in record.items("train", dict):
        dataset = Fields(root.path, entry, "data.train")
        dataset.text("prefix")
        dataset.text("digest")
        if dataset.has("weight"):
            dataset.number("weight", 0)
        else:
            dataset.value("weight")
    if record.has("split"):
        record.text("split")
    return record.content
