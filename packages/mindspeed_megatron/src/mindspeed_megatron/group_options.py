"""Options of the backend for the process groups that megatron-core builds itself; no torch.

megatron-core asks one function for the options of its groups, which knows those of NCCL alone. A feature that
gives options by the name of a group (``session.groups.choose_options``) lists `OF_OWN_GROUPS` among its
patches, and is then asked for megatron-core's groups too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from mindspeed_core.feature import Patch

NAMES = (
    *("dp", "dp_cp", "intra_dp_cp", "cp", "hcp", "mp", "tp", "pp", "embd", "pos_embd"),
    *("tp_dp_cp", "tp_dp", "tp_cp", "ep", "ep_tp", "tp_ep_mp", "tp_ep_pp", "ep_dp", "intra_ep_dp"),
    *("inter_ep_dp", "intra_dist_opt_instance"),
    # Since 0.19.
    *("gtp_remat", "expt_gtp_remat", "tp_ep_gtp_remat_pp"),
)
"""Names under which megatron-core asks for options."""

OF_OWN_GROUPS = Patch(
    "megatron.core.parallel_state:get_nccl_options",
    "mindspeed_megatron.group_options:asking_the_session",
    kind="wrap",
    versions="megatron-core>=0.15,<0.20",
    reason="megatron-core asks this function alone for the options of the groups that it builds",
)
"""Patch of a feature that gives options to megatron-core's groups."""


def asking_the_session(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_nccl_options``: options of the open session come first, then those of NCCL."""

    @wraps(original)
    def get_nccl_options(pg_name: str, nccl_comm_cfgs: Mapping[str, Any]) -> Any:
        from mindspeed_core.session import current

        options = current().groups.options_of(pg_name)
        return original(pg_name, nccl_comm_cfgs) if options is None else options

    return get_nccl_options
