"""Tools that prove features and try what can go wrong: worlds, comparison, `verify`, faults, absent devices.

`worlds` (several ranks on this machine), `canonical` (one unsharded state of any layout), `compare`,
`training` (a short training as one side of a proof), `verify` and `contract` are what every plugin uses.
`npu` runs NPU branches without a device, `lagging` trains on a late one; `faults`, `kills` and `soak` break
and wear out runs. Importing this package loads neither torch nor megatron: pytest imports it for every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_testing.worlds import WorldError, run_world

__all__ = ["WorldError", "run_world"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # `mindspeed-features list` asks for the platform of this package, and starts no world.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mindspeed_testing import worlds

    return getattr(worlds, name)
