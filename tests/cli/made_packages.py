"""Sources and metadata of packages that tests make up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FEATURE = """
from mindspeed_core.feature import *

class {cls}(Feature):
    name = "{name}"
    family = "{family}"
    summary = "A feature for tests"
    flags = (Flag("--{name}", help="Switch it on."),)
{body}

DECLARATIONS = ({cls},)
"""


def feature_source(name: str, body: str = "", family: str = "samples") -> str:
    cls = "".join(word.capitalize() for word in name.split("-"))
    lines = "\n".join("    " + line for line in body.splitlines())
    return FEATURE.format(cls=cls, name=name, family=family, body=lines)


def write_metadata(site: Path, dist: str, entry_points: Mapping[str, str], version: str = "0.1.0") -> None:
    """``entry_points``: ``{"group name": "module:attribute"}``."""
    info = site / f"{dist.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
    lines = []
    for key, value in entry_points.items():
        group, name = key.split()
        lines.append(f"[{group}]\n{name} = {value}\n")
    (info / "entry_points.txt").write_text("\n".join(lines))
