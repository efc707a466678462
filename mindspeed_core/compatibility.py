"""What this release works with: a table of data.

``mindspeed-features doctor`` compares it with what is installed, and the documentation prints it; nothing
else in the project decides by version numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

PYTHON = ">=3.10"
"""Versions of Python, PEP 440."""


@dataclass(frozen=True)
class Supported:
    """One row of the compatibility table.

    Attributes:
        distribution: the name on the package index.
        versions: PEP 440 specifier that works.
        tested: the versions the test suite runs with.
        required: training is impossible without it; otherwise it is looked at only where it is installed.
        platform: the platform that needs it, empty for all.
        remedy: the command that puts it right.
    """

    distribution: str
    versions: str
    tested: tuple[str, ...] = ()
    required: bool = True
    platform: str = ""
    remedy: str = ""


TABLE = (
    Supported("torch", ">=2.6", ("2.13.0",), remedy="pip install 'torch>=2.6'"),
    Supported(
        "megatron-core",
        ">=0.15.3,<0.17",
        ("0.15.3", "0.16.1"),
        remedy="pip install 'megatron-core>=0.15.3,<0.17'",
    ),
    Supported("pluggy", ">=1.5", remedy="pip install 'pluggy>=1.5'"),
    Supported("numpy", ">=1.26", remedy="pip install 'numpy>=1.26'"),
    Supported(
        "torch_npu",
        ">=2.6",
        required=False,
        platform="npu",
        remedy="pip install the torch_npu whose version equals torch's (torch_npu 2.7.1 for torch 2.7.1)",
    ),
)


def matches(version: str, versions: str) -> bool:
    """Whether an installed version satisfies a PEP 440 specifier; local parts (``+cu126``) do not count."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        public = Version(version).public
    except InvalidVersion:
        return False
    return SpecifierSet(versions).contains(public, prereleases=True)


def same_release(left: str, right: str) -> bool:
    """Whether two versions share major, minor and micro number (torch 2.7.1+cpu, torch_npu 2.7.1.post2)."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(left).release[:3] == Version(right).release[:3]
    except InvalidVersion:
        return False
