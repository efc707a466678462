"""Asks torch and megatron-core about this machine, in a process of its own.

A broken native library ends the process that imports it; the doctor has to survive that and say so. Run as
``python -m mindspeed_megatron.doctor.probe``; prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mindspeed_megatron.broken_packages import OPTIONAL, take_broken_as_absent, used_module

MARK = "mindspeed-doctor:"
"""Begins the line with the answer; imported packages print lines of their own."""


def probe() -> dict[str, Any]:
    """Collect versions and devices from torch and megatron-core.

    Returns:
        ``torch`` (version or ``error: …``), ``backends`` (name: available), ``cuda`` and ``npu`` (device
        names), ``torch_npu`` (``ok`` or the error), ``unserved`` (calls that this torch_npu does not take:
        text, and whether sources ask first), ``megatron`` and ``helpers_cpp`` (``ok`` or the error),
        ``optional`` (likewise, by module).
    """
    take_broken_as_absent()
    answer: dict[str, Any] = {"backends": {}, "cuda": [], "npu": []}
    try:
        torch = import_module("torch")
        distributed = import_module("torch.distributed")
    except Exception as error:
        answer["torch"] = f"error: {type(error).__name__}: {error}"
        return answer
    answer["torch"] = str(torch.__version__)
    available = distributed.is_available()
    answer["backends"] = {
        "gloo": available and distributed.is_gloo_available(),
        "nccl": available and distributed.is_nccl_available(),
    }
    if torch.cuda.is_available():
        answer["cuda"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    answer["torch_npu"] = _outcome("torch_npu")
    if answer["torch_npu"] == "ok":
        answer["unserved"] = _unserved_calls()
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        answer["npu"] = [npu.get_device_name(index) for index in range(npu.device_count())]
        answer["backends"]["hccl"] = True
    installed = [name for name in OPTIONAL if find_spec(name) is not None]
    answer["optional"] = {name: _outcome(used_module(name)) for name in installed}
    answer["megatron"] = _outcome("megatron.core")
    answer["helpers_cpp"] = _outcome("megatron.core.datasets.helpers_cpp")
    return answer


def _unserved_calls() -> list[tuple[str, bool]]:
    from mindspeed_core.registry import Registry
    from mindspeed_megatron.devices.torch_npu_calls import unserved_calls
    from mindspeed_megatron.devices.torch_npu_uses import package_folders

    installed = {name for names in Registry.discover().packages().values() for name in names}
    folders = package_folders(sorted(installed - {"mindspeed_testing"}))
    return [(str(call), call.asked_first) for call in unserved_calls(folders)]


def _outcome(module: str) -> str:
    try:
        import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


if __name__ == "__main__":
    print(MARK + json.dumps(probe()), file=sys.stdout, flush=True)
