"""The extension points of this package, for its declarations and its operators. No torch."""

from __future__ import annotations

from mindspeed_core.feature import ExtensionPoint

BACKENDS = ExtensionPoint(
    name="kernels.backends",
    group="mindspeed_kernels.backends",
    summary="iterables of mindspeed_kernels.ops.Backend: implementations of operators",
    check="mindspeed_kernels.ops.catalog:check_backends",
)
