"""Compiled functions of the installed torch while somebody looks at its operations.

For notes of features: nothing is imported.
"""

from __future__ import annotations

from functools import lru_cache

from mindspeed_core.discovery.installed import package_file

_MODES = "torch:utils/_python_dispatch.py"
_ANSWER = "def ignore_compile_internals"


@lru_cache(maxsize=1)
def run_eagerly_when_observed() -> bool:
    """Return whether compiled functions run eagerly under `mindspeed_megatron.instruments.observer.Observer`.

    Newer releases of torch ask a mode; those of early 2025 and before run eagerly under each.

    Returns:
        What the source of the installed torch says, read once a process; True where there is no torch.
    """
    file = package_file(_MODES)
    return file is None or _ANSWER not in file.read_text(encoding="utf-8")
