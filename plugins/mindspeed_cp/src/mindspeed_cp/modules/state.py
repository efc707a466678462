"""The state of context parallelism in a session."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed_cp.options import CPOptions, cp_options

if TYPE_CHECKING:
    from torch import Tensor

    from mindspeed_core.session import Session
    from mindspeed_cp.engine.masks import MaskRule


@dataclass
class CPState:
    """The record of a session, see `mindspeed_core.session.Session.state`.

    Attributes:
        options: what the flags choose.
        plugin_rules: the first answer of a plugin to ``cp_mask_rule``, where it stays for the run.
        matrix_rule: the mask that a script gave, its version, and the rule made of it.
    """

    options: CPOptions | None = None
    plugin_rules: tuple[MaskRule, ...] | None = None
    matrix_rule: tuple[Tensor, int, MaskRule] | None = None


def session_options(session: Session, args: Namespace) -> CPOptions:
    """Return the options of a session, built from its validated arguments when first asked for."""
    state = session.state(CPState)
    if state.options is None:
        state.options = cp_options(args)
    return state.options
