"""Faults of a package's declarations, for its own tests."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

from mindspeed_core.discovery.feature_checks import check_feature, declared_features
from mindspeed_core.discovery.installed import package_file

_HEAVY = ("torch", "megatron", "numpy")


def declaration_faults(module: str) -> list[str]:
    """Return what is wrong with declared features: unsound, without a page of their flags, heavy to import.

    Args:
        module: dotted name of the module with ``DECLARATIONS``, for instance ``mindspeed_moe.features``.
    """
    code = f"import sys, {module}; print(*(name for name in {_HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    faults = [f"{module}: {done.stderr}"] if done.returncode else []
    faults += [f"{module} imports {name}" for name in done.stdout.split()]
    features = declared_features(import_module(module).DECLARATIONS)
    if not features:
        faults.append(f"{module} declares no feature")
    for feature in features:
        faults += [f"{feature.name}: {fault}" for fault in check_feature(feature)]
        page = package_file(feature.docs) if feature.docs else None
        if page is None:
            faults.append(f"{feature.name}: its package has no page {feature.docs!r}")
            continue
        text = page.read_text(encoding="utf-8")
        options = [option for flag in feature.flags for option in flag.options]
        faults += [f"{feature.docs} does not mention {option}" for option in options if option not in text]
    return faults
