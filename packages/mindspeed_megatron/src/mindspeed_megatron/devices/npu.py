"""Ascend devices through torch_npu, with HCCL.

megatron-core names cuda in its source; torch_npu's own ``contrib.transfer_to_npu`` makes those names mean the
NPU. It cannot be taken back: a process that opened a session on this platform stays one for NPUs. What the
transfer leaves out is patched here. Names and signatures were checked against the Python sources of torch_npu
2.13.0; nothing in this file was run on a device.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_core.discovery.installed import installed_version
from mindspeed_core.errors import SessionError, UserError
from mindspeed_core.feature import Patch
from mindspeed_core.platforms.cpu import hold_eager
from mindspeed_core.platforms.machine import first_match
from mindspeed_core.platforms.platform import Availability, OpeningSession
from mindspeed_megatron.devices.accelerator import AcceleratorPlatform
from mindspeed_megatron.devices.cann import libraries_missing
from mindspeed_megatron.devices.without_te import patches_without_te

if TYPE_CHECKING:
    from pathlib import Path

_CALLS = "mindspeed_megatron.devices.cuda_calls:"
_LEFT_OUT = (
    Patch(
        target="torch.cuda:_lazy_call",
        new="torch_npu.npu:_lazy_call",
        reason="torch's own queues until CUDA starts, which never happens: RNG states would not be set",
    ),
    Patch(
        target="torch.cuda:_lazy_init",
        new="torch_npu.npu:_lazy_init",
        reason="torch's own raises on a build without CUDA",
    ),
    Patch(
        target="torch.cuda.nvtx:range_push",
        new=_CALLS + "range_push",
        reason="torch's own raises on a build without CUDA",
    ),
    Patch(
        target="torch.cuda.nvtx:range_pop",
        new=_CALLS + "range_pop",
        reason="torch's own raises on a build without CUDA",
    ),
    Patch(
        target="torch.cuda:get_device_capability",
        new=f"{__name__}:known_capability",
        kind="wrap",
        reason="torch's broadcast compares it with CUDA versions, and torch_npu returns None",
    ),
    Patch(
        target="torch:Tensor.type",
        new="mindspeed_megatron.devices.device_arguments:tensor_type",
        kind="wrap",
        reason="megatron's optimizer compares type names with torch.cuda.FloatTensor",
    ),
)


_VERSION = "TORCH_NPU_DEVICE_CAPABILITY"


def known_capability(original: Callable[..., Any]) -> Callable[..., tuple[int, int]]:
    """Wrap ``get_device_capability``: older than every CUDA version unless the user's variable says one."""

    @functools.wraps(original)
    def get_device_capability(device: Any = None) -> tuple[int, int]:
        # torch_npu warns on each call without the variable.
        found: tuple[int, int] | None = original(device) if os.environ.get(_VERSION) else None
        return found or (0, 0)

    return get_device_capability


class NpuPlatform(AcceleratorPlatform):
    """An Ascend NPU."""

    name: ClassVar[str] = "npu"
    device_type: ClassVar[str] = "npu"
    backend: ClassVar[str] = "hccl"
    preference: ClassVar[int] = 20
    visible_devices: ClassVar[str] = "ASCEND_RT_VISIBLE_DEVICES"
    distributions: ClassVar[Sequence[str]] = ("torch_npu",)

    @classmethod
    def probe(cls) -> Availability:
        """Look for torch_npu and for device files; imports nothing."""
        installed = installed_version("torch_npu")
        if not installed:
            return Availability(False, "torch_npu is not installed")
        missing = libraries_missing()
        if missing:
            return Availability(False, missing)
        from pathlib import Path

        count = device_files(Path("/dev"))
        if not count:
            return Availability(False, "no Ascend device file (/dev/davinci0) on this machine")
        return Availability(True, f"{count} Ascend device(s), torch_npu {installed}")

    def runtime(self) -> Any:
        """Return ``torch.npu``, which importing torch_npu defines."""
        import torch

        return torch.npu  # type: ignore[attr-defined]

    def driver(self) -> str:
        """Return the version of the driver, where it is installed in its usual place."""
        from pathlib import Path

        return first_match(Path("/usr/local/Ascend/driver/version.info"), r"^Version=(.+)$")

    def patches(self) -> Sequence[Patch]:
        """Transfer cuda names to the NPU, then patch what the transfer leaves out.

        Raises:
            SessionError: torch_npu cannot be imported, or sees no device.
        """
        _import("torch_npu", "install the torch_npu whose version equals torch's, and run CANN's set_env.sh")
        if not self.runtime().is_available():
            raise SessionError(
                "platform npu: torch.npu.is_available() is False; run CANN's set_env.sh, check the driver "
                f"with npu-smi info and the variable {self.visible_devices}, or choose --platform cpu"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _import(
                "torch_npu.contrib.transfer_to_npu", "the installed torch_npu is incomplete, reinstall it"
            )
        _drop_rules_of_transferred_names()
        return (*_LEFT_OUT, *patches_without_te())

    def open(self, session: OpeningSession) -> None:
        """Run compiled functions eagerly: generating device code needs a separate compiler."""
        hold_eager(
            session, owner=self.name, reason="generating device code needs a compiler that torch_npu lacks"
        )

    def allocator_settings(self, settings: str) -> None:
        """Set options of the caching allocator, in the syntax of ``PYTORCH_NPU_ALLOC_CONF``.

        Raises:
            UserError: at run time only ``expandable_segments`` can be changed.
        """
        if os.environ.get("PYTORCH_NPU_ALLOC_CONF") == settings:
            return
        names = {option.partition(":")[0].strip() for option in settings.split(",")}
        if names != {"expandable_segments"}:
            raise UserError(
                f"allocator settings {settings!r}: torch_npu reads them only at start; set "
                f"PYTORCH_NPU_ALLOC_CONF={settings} in the environment"
            )
        memory = self.runtime().memory
        if not hasattr(memory, "_set_allocator_settings"):
            raise UserError(
                f"allocator settings {settings!r}: this build of torch_npu reads them only at start; set "
                f"PYTORCH_NPU_ALLOC_CONF={settings} in the environment"
            )
        memory._set_allocator_settings(settings)


def _import(name: str, remedy: str) -> None:
    try:
        import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise SessionError(f"platform npu: {name} cannot be imported ({error}); {remedy}") from error


def _drop_rules_of_transferred_names() -> None:
    """Forget what dynamo is to do at names of ``torch.cuda`` that mean functions of torch_npu now.

    torch_npu brings rules of its own for its functions. Dynamo traces nothing, and megatron-core cannot be
    imported, where one function has two names with different rules.
    """
    from torch._dynamo import trace_rules

    tables: Any = trace_rules.torch_name_rule_map
    for rules in tables:
        for name in [name for name in rules if name.startswith("torch.cuda.")]:
            meant = trace_rules.load_object(name)
            if str(getattr(meant, "__module__", "")).startswith(("torch_npu.", "torch.npu.")):
                del rules[name]


def device_files(directory: Path) -> int:
    """Count the devices the driver shows; ``davinci_manager`` is not one."""
    return sum(path.name[7:].isdigit() for path in directory.glob("davinci[0-9]*"))
