"""The choice of the kernel that computes a task, made once for each kind of task.

Other packages name a `BlockKernel` in the entry-point group ``mindspeed_cp.block_kernels`` (the extension
point ``cp.block_kernels``). They are looked for when a kernel is first chosen, with or without a session; a
package that cannot be loaded takes nobody else down.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from torch import Tensor

from mindspeed_core.discovery.extensions import installed_extensions
from mindspeed_core.feature import DeclarationError
from mindspeed_cp.engine.kernels.contract import BlockKernel, Case
from mindspeed_cp.engine.kernels.cpu import CpuFlashKernel
from mindspeed_cp.engine.kernels.cuda import CudaFlashKernel
from mindspeed_cp.engine.kernels.npu import NpuKernel
from mindspeed_cp.engine.kernels.products import ProductsKernel
from mindspeed_cp.engine.kernels.rows import is_band
from mindspeed_cp.engine.scores import Scores
from mindspeed_cp.engine.tasks import Task
from mindspeed_cp.extension_points import BLOCK_KERNELS
from mindspeed_megatron.planned_kernels import kernels_for

logger = logging.getLogger("mindspeed_cp")

_kernels: dict[str, BlockKernel] = {
    kernel.name: kernel for kernel in (CpuFlashKernel(), CudaFlashKernel(), NpuKernel(), ProductsKernel())
}
_chosen: dict[Case, BlockKernel] = {}
_logged: set[tuple[str, str]] = set()
_forced: BlockKernel | None = None
_loaded = False


def known_kernels() -> dict[str, BlockKernel]:
    """Return every kernel of this process by name, those of other packages too."""
    _load()
    return dict(_kernels)


def add_kernel(kernel: BlockKernel) -> None:
    """Let a kernel be chosen.

    Raises:
        DeclarationError: there is one of this name.
    """
    check_kernel(kernel)
    if kernel.name in _kernels:
        raise DeclarationError(f"there is a block kernel {kernel.name!r} already; use another name")
    _kernels[kernel.name] = kernel
    _chosen.clear()


def check_kernel(extension: Any) -> None:
    """Refuse an object that is not a block kernel.

    Raises:
        DeclarationError: says what it is.
    """
    if not isinstance(extension, BlockKernel):
        raise DeclarationError(f"{extension!r} is not an instance of mindspeed_cp.engine.kernels.BlockKernel")
    if not isinstance(getattr(extension, "name", None), str):
        raise DeclarationError(f"block kernel {extension!r} has no name")
    if len(signature(extension.backward).parameters) != 1:
        raise DeclarationError(f"block kernel {extension.name!r}: backward takes one BackwardBlock")


@contextmanager
def using(kernel: BlockKernel) -> Iterator[None]:
    """Choose a kernel, known or not, for every task that it can compute, whatever its priority."""
    global _forced
    before, _forced = _forced, kernel
    _chosen.clear()
    try:
        yield
    finally:
        _forced = before
        _chosen.clear()


def kernel_for(query: Tensor, key: Tensor, value: Tensor, task: Task, scores: Scores) -> BlockKernel:
    """Return the kernel that computes a task.

    Args:
        query: ``[b, n, s, d]``, all rows.
        key: ``[b, g, t, d]``.
        value: ``[b, g, t, dv]``.
        task: what is computed.
        scores: mask rule, bias, dropout.
    """
    square = task.rows[1] - task.rows[0] == task.columns[1] - task.columns[0]
    sizes = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    bias, dropout = scores.slopes is not None, scores.dropout is not None
    band = is_band(task, scores.rule)
    case = Case(task.kind, band, square, kernels_for(query.device.type), query.dtype, *sizes, bias, dropout)
    kernel = _chosen.get(case)
    if kernel is None:
        kernel = _chosen[case] = choose(case)
    return kernel


def choose(case: Case) -> BlockKernel:
    """Return the preferred kernel for a case; log it once per device type, a missing package as a warning."""
    _load()
    if _forced is not None and not refusal(_forced, case):
        return _forced
    refused: list[str] = []
    missing = False
    for kernel in sorted(_kernels.values(), key=lambda item: (-item.priority, item.name)):
        if not (case.device in kernel.devices or "*" in kernel.devices):
            continue
        reason = refusal(kernel, case)
        if not reason:
            _log(kernel, case.device, refused, logging.WARNING if missing else logging.INFO)
            return kernel
        missing = missing or bool(kernel.missing())
        refused.append(f"{kernel.name} cannot: {reason}")
    raise ValueError(f"no block kernel computes {case}: {'; '.join(refused)}")


def refusal(kernel: BlockKernel, case: Case) -> str:
    """Return why a kernel does not compute a case; empty when it does."""
    if not (case.device in kernel.devices or "*" in kernel.devices):
        return f"it runs on {', '.join(kernel.devices)}"
    return kernel.missing() or kernel.refusal(case)


def _log(kernel: BlockKernel, device: str, refused: list[str], level: int) -> None:
    if (device, kernel.name) not in _logged:
        _logged.add((device, kernel.name))
        reasons = f"; {'; '.join(refused)}" if refused else ""
        logger.log(level, "attention over split sequences on %s uses %s%s", device, kernel.name, reasons)


def _load() -> None:
    """Add the kernels of other packages, once per process."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    extensions = installed_extensions(BLOCK_KERNELS)
    for name, kernel in extensions.sound().items():
        try:
            add_kernel(kernel)
        except DeclarationError as error:
            logger.warning("%s of %s: %s", name, extensions.distribution(name), error)
    for broken in extensions.broken:
        logger.warning("%s", broken)
