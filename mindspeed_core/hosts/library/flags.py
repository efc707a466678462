"""The flags of a library session: they describe the caller's model and loop, nothing is built from them.

Names and meanings are the standalone host's, which are Megatron-LM's, so that a feature finds what it
requires (``--normalization RMSNorm``) in whichever host it runs. Flags of what the caller does itself are
left out.
"""

from __future__ import annotations

from mindspeed_core.feature import Flag
from mindspeed_core.hosts.standalone import flags as standalone
from mindspeed_core.megatron import megatron_lm_flags

_THE_CALLERS = frozenset({"checkpoints", "watching", "stopping and recovery"})
# Whether attention gets a mask, and over what, decides which attention fits.
_OF_THE_DATA = frozenset(
    {
        "--reset-position-ids",
        "--reset-attention-mask",
        "--eod-mask-loss",
        "--create-attention-mask-in-dataloader",
    }
)


def host_flags() -> tuple[Flag, ...]:
    """The flags that describe a model, its parallelism, its optimizer and its batches."""
    return tuple(flag for flag in standalone.host_flags() if _describes(flag))


def _describes(flag: Flag) -> bool:
    return flag.group not in _THE_CALLERS and (flag.group != "data" or flag.name in _OF_THE_DATA)


def why_absent(option: str) -> str:
    """Why a flag of the standalone host is not here; empty for flags that it does not have either."""
    if any(option in flag.options for flag in standalone.host_flags() if not _describes(flag)):
        return "data, checkpoints, logging and stopping are your own loop's in a library session"
    return megatron_lm_flags.why_absent(option)
