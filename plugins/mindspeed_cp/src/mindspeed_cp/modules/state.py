"""The state of context parallelism in a session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from mindspeed_cp.engine.masks import MaskRule


@dataclass
class CPState:
    """The record of a session, see `mindspeed_core.session.Session.state`.

    Attributes:
        plugin_rules: the first answer of a plugin to ``cp_mask_rule``, where it stays for the run.
        matrix_rule: the mask that a script gave, its version, and the rule made of it.
    """

    plugin_rules: tuple[MaskRule, ...] | None = None
    matrix_rule: tuple[Tensor, int, MaskRule] | None = None
