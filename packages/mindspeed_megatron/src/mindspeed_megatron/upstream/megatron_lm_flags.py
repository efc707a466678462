"""Facts about Megatron-LM's flags, taken from a checkout.

They are written by ``tools/megatron_lm_flags.py``; what holds for each here stands in
`mindspeed_megatron.upstream`. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any


@lru_cache(maxsize=1)
def megatron_lm_flags() -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """Return the version of the checkout and the facts of each of its flags.

    Raises:
        OSError: the table of this installation cannot be read.
    """
    path = Path(__file__).with_name("megatron_lm_flags.json")
    table = json.loads(path.read_text(encoding="utf-8"))
    return table["version"], tuple(table["flags"])
