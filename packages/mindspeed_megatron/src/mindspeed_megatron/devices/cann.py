"""CANN's libraries beside an installed torch_npu: asked for before torch, which imports torch_npu by itself.

A torch_npu without its libraries makes ``import torch`` fail, for a training on CPU too, and a second import
in the same process fails with a message about torch's own registrations. Nothing here imports either.
"""

from __future__ import annotations

import os
import sys
from functools import cache

from mindspeed_core.discovery.installed import installed_version

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Is 0 in a process whose torch imports no other backend by itself."""
_LIBRARY = "libascendcl.so"
WAY_OUT = "source CANN's set_env.sh (by default /usr/local/Ascend/ascend-toolkit/set_env.sh)"


@cache
def libraries_missing() -> str:
    """Return why the installed torch_npu cannot be imported; empty where it can, and where there is none."""
    installed = installed_version("torch_npu")
    if not installed or "torch_npu" in sys.modules:
        return ""
    import ctypes

    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        found = f"torch_npu {installed} is installed, but CANN's {_LIBRARY} is not on the library path"
        return f"{found}; {WAY_OUT}"
    return ""


def hold_back_torch_npu() -> None:
    """Let torch be imported without torch_npu in this process and its children, where CANN is missing.

    Platforms that do not need it go on; platform ``npu`` says what to do. A user's own setting stays.
    """
    if "torch" not in sys.modules and libraries_missing():
        os.environ.setdefault(AUTOLOAD, "0")
