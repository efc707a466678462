"""The flags of a library session: they describe the caller's model and loop, nothing is built from them."""

from __future__ import annotations

from mindspeed_core.feature import Flag
from mindspeed_megatron.flags import describing_flags

_PROGRAM = "standalone"
"""Host of the training program, whose further flags are about what the caller does itself here."""


def host_flags() -> tuple[Flag, ...]:
    """Return the flags that describe a model, its parallelism, its optimizer and its batches."""
    return describing_flags()


def why_absent(option: str) -> str:
    """Say why a flag of the training program is not here; nothing of flags that it does not have either."""
    from mindspeed_core.registry import Registry

    registry = Registry.discover()
    flags = registry.host_flags(_PROGRAM) if _PROGRAM in registry.host_names() else ()
    if any(option in flag.options for flag in flags):
        return "data, checkpoints, logging and stopping are your own loop's in a library session"
    return ""
