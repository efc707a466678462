"""Record every symbol of megatron-core that the project relies on, and what each version has for it.

    pip download --no-deps --ignore-requires-python -d wheels megatron-core==0.19.2
    python tools/touch_points.py wheels/*.whl

``--compare OLD NEW`` prints what changed between two recorded versions. Sources and wheels are read, not
imported. The records lie in `mindspeed_megatron.touch_points`; the tests fail where they are not those of the
sources. ``nox -s touch_points`` downloads the wheels of all recorded versions and writes them again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from packaging.utils import parse_wheel_filename

from mindspeed_megatron.touch_points.changes import changes
from mindspeed_megatron.touch_points.record import known_uses, known_version, write_uses, write_versions
from mindspeed_megatron.touch_points.sources import FOREIGN, Sources
from mindspeed_megatron.touch_points.uses import Use, package_sources, uses_of

ROOT = Path(__file__).resolve().parents[1]


def packages() -> list[Path]:
    """Return the folders of the import packages of this repository."""
    found = (*ROOT.glob("packages/*/src/*"), *ROOT.glob("plugins/*/src/*"))
    return [ROOT / "mindspeed_core", *sorted(path for path in found if (path / "__init__.py").is_file())]


def points_of(uses: dict[str, Use], versions: list[Sources]) -> dict[str, Use]:
    """Return the uses without members that are ours, or torch's, in every version."""
    return {
        point: use
        for point, use in uses.items()
        if any((symbol := sources.symbol(point)) and symbol.kind != FOREIGN for sources in versions)
    }


def compare(old: str, new: str) -> int:
    """Print what changed between two recorded versions."""
    _, uses = known_uses()
    found = changes(uses, known_version(old).symbols, known_version(new).symbols.get)
    print(f"{old} to {new}: {len(found)} of {len(uses)} touch points changed")
    for change in found:
        print(f"{'breaks ' if change.breaks else 'differs'} {change}  [{', '.join(change.modules)}]")
    return 0


def main(arguments: list[str]) -> int:
    """Write the records."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheels", nargs="*", type=Path, help="Wheels of all versions to record.")
    parser.add_argument("--compare", nargs=2, metavar=("OLD", "NEW"), help="Print what changed.")
    options = parser.parse_args(arguments)
    if options.compare:
        return compare(*options.compare)
    if not options.wheels:
        parser.error("name the wheels of all versions to record, or --compare OLD NEW")
    versions = {str(parse_wheel_filename(path.name)[1]): Sources.of_wheel(path) for path in options.wheels}
    folders = packages()
    uses = points_of(uses_of(package_sources(folders)), list(versions.values()))
    write_uses([folder.name for folder in folders], uses)
    write_versions(uses, {version: sources.symbol for version, sources in versions.items()})
    for version, sources in versions.items():
        print(f"{version}: {sum(sources.symbol(point) is not None for point in uses)} of {len(uses)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
