"""Functions and classes of the core's interface that another distribution supplies.

They know megatron-core from the inside, which the core does not. The entry-point group ``mindspeed.parts``
has them under the names that authors use.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from mindspeed_core.discovery.distributions import entries, headers, installed_distributions
from mindspeed_core.discovery.entry_points import Source
from mindspeed_core.errors import UserError

PARTS = "mindspeed.parts"
SUPPLIER = "mindspeed-megatron"


def part(name: str) -> Any:
    """Load a part of the interface.

    Args:
        name: of the entry point.

    Raises:
        UserError: what supplies it is not installed, or is older than this core.
    """
    supplied = _parts()
    if name in supplied:
        return supplied[name].load()
    if supplied:
        raise UserError(
            f"{name} is missing in the installed {SUPPLIER}, which is older than this core: "
            f"pip install --upgrade {SUPPLIER}"
        )
    raise UserError(f"{name} comes with {SUPPLIER}, which is not installed: pip install {SUPPLIER}")


def part_if_installed(name: str) -> Any | None:
    """Load a part of the interface; None where what supplies it is not installed.

    Raises:
        UserError: what supplies it is older than this core.
    """
    return part(name) if _parts() else None


@lru_cache(maxsize=1)
def _parts() -> dict[str, Source]:
    for name, read in installed_distributions():
        if name == SUPPLIER:
            version = headers(read).get("Version", "")
            supplied = [(entry, value) for group, entry, value in entries(read) if group == PARTS]
            return {entry: Source(SUPPLIER, version, entry, value) for entry, value in supplied}
    return {}
