"""Links to the text that each package has of its features."""

from __future__ import annotations

from pathlib import Path

from tables import code

from mindspeed_core.feature import Feature

ROOT = Path(__file__).resolve().parent.parent


def page_of(feature: type[Feature]) -> Path | None:
    """The feature's own page in this repository."""
    package, _, relative = feature.docs.partition(":")
    return next(iter(sorted(ROOT.glob(f"plugins/*/src/{package}/{relative}"))), None) if relative else None


def manual_link(feature: type[Feature], root: str = "../..") -> str:
    """A link to the feature's own page; its name where it has none here.

    Args:
        feature: to link to.
        root: way from the folder of the linking page to the repository's root.
    """
    text = page_of(feature)
    if text is None:
        return code(feature.name)
    return f"[{feature.name}]({root}/{text.relative_to(ROOT).as_posix()})"
