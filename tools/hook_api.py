"""Write down the public hook interface, so that every change of it is deliberate.

``python tools/hook_api.py`` writes ``tests/contract/hook_api/VERSION.json`` for the present version. Files of
earlier versions stay: the tests hold the present interface against each of them.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from mindspeed_core import feature
from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.discovery.stages import core_stages
from mindspeed_core.hooks import API_VERSION
from mindspeed_core.platforms.platform import Platform

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "contract" / "hook_api"
DECLARATIONS = (
    feature.Flag,
    feature.Slot,
    feature.Requirement,
    feature.Conflict,
    feature.Fallback,
    feature.TakeOver,
    feature.Patch,
    feature.Gain,
    feature.Resume,
    feature.Scenario,
    feature.ExtensionPoint,
    feature.StageSpecs,
    feature.HookApi,
    HostDeclaration,
)


def interface() -> dict[str, Any]:
    """Return the interface as plain data: stages with arguments and versions, declarations with fields."""
    return {
        "version": API_VERSION,
        "stages": {
            name: {
                "since": stage.since,
                "arguments": {
                    argument: stage.added.get(argument, stage.since)
                    for argument in sorted(stage.arguments or ())
                },
                "collects": not stage.firstresult,
            }
            for name, stage in sorted(core_stages().items())
        },
        "declarations": {
            declaration.__name__: [field.name for field in dataclasses.fields(declaration)]
            for declaration in DECLARATIONS
        },
        "feature": sorted(name for name in vars(feature.Feature) if not name.startswith("_")),
        "platform": sorted(name for name in vars(Platform) if not name.startswith("_")),
    }


def main() -> None:
    """Write the file of the present version."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{API_VERSION}.json"
    path.write_text(json.dumps(interface(), indent=2) + "\n", encoding="utf-8")
    print(path.name)


if __name__ == "__main__":
    main()
