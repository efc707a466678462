"""The extension points of mindspeed-kernels, for its declarations and for what calls contributions. No torch.

A package contributes through its ``pyproject.toml``::

    [project.entry-points."mindspeed_kernels.backends"]
    acme = "acme_kernels:BACKENDS"

Each backend names its operator and how much it is preferred over others that take a call. They are loaded
when an operator is first called, and one that is broken is named in a warning and left out; calls go on with
those that remain.

``mindspeed-features list --all`` names every extension point, and what is broken.
"""

from __future__ import annotations

from mindspeed_core.feature import ExtensionPoint

BACKENDS = ExtensionPoint(
    name="kernels.backends",
    group="mindspeed_kernels.backends",
    summary="iterables of mindspeed_kernels.ops.Backend: implementations of operators",
    check="mindspeed_kernels.ops.catalog:check_backends",
)
"""Implementations of operators, each for some devices and dtypes."""
