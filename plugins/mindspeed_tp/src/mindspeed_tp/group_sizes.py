"""Buffer sizes and expansion modes of process groups: what flags say and messages need; no torch."""

from __future__ import annotations

import math
from typing import Any

from mindspeed_core.errors import RefusedValue
from mindspeed_megatron.group_options import NAMES

Numbers = tuple[tuple[str, int], ...]
"""Names of groups with a number each, in the order given."""

MINDSPEED = {
    "exp": "ep",
    "tp_exp": "tp_ep_mp",
    "mp_exp": "tp_ep_pp",
    "dp_modulo_exp": "ep_dp",
    "cp_ulysses": "cp.inner",
    "cp_ring": "cp.outer",
    "cp_ring_intra": "cp.across",
    "cp2": "cp.second",
    "nd1_dim1": "tp2d.x",
    "nd1_dim2": "tp2d.y",
}
"""MindSpeed's names of groups, where they are others than here."""
WITHOUT_GROUP = (
    *("pp_new_stream", "cp_ring_intra_overlap", "ag_x_sd_rcv_overlap", "ag_y_sd_rcv_overlap"),
    *("nd2_dim1", "nd2_dim2", "default_group"),
)
"""MindSpeed's names of groups that are not here, or not made by what these options reach."""
SMALL = 10
"""Mebibytes of groups that send a few numbers."""


def group_numbers(text: str) -> Numbers:
    """Read ``"dp:200;tp:300"``; commas separate as well.

    Raises:
        RefusedValue: an entry is no name and positive number, or its name is no group's.
    """
    found: dict[str, int] = {}
    for entry in filter(None, (part.strip() for part in text.replace(",", ";").split(";"))):
        name, colon, number = (part.strip() for part in entry.partition(":"))
        if not (name and colon and number.isascii() and number.isdigit() and int(number)):
            raise RefusedValue(f"{entry!r} is no group with a positive whole number, such as tp:200")
        own = MINDSPEED.get(name, name)
        # Groups of features have a dot in their names; what a run creates is known when it has.
        if own not in NAMES and own not in WITHOUT_GROUP and "." not in own:
            raise RefusedValue(f"{name!r} is no group; groups are {', '.join((*NAMES, *MINDSPEED))}")
        if own in found:
            raise RefusedValue(f"{name!r} is given twice")
        found[own] = int(number)
    if not found:
        raise RefusedValue("names no group; write GROUP:NUMBER;GROUP:NUMBER")
    return tuple(found.items())


def adaptive_sizes(args: Any) -> dict[str, int]:
    """Return the mebibytes that the largest message of each group needs, by the group's name.

    Groups of data parallelism, and of experts without a factor, keep the size of HCCL's own default.

    Args:
        args: with sizes of the model and its layout.
    """
    from mindspeed_tp.model_sizes import ModelSizes

    sizes = ModelSizes.of(args)
    t = args.tensor_model_parallel_size
    x, y = getattr(args, "tp_x", 1), getattr(args, "tp_y", 1)
    half = getattr(args, "bf16", False) or getattr(args, "fp16", False)
    spread = getattr(args, "sequence_parallel", False)
    rows = sizes.positions * sizes.batch
    query, key_value = sizes.heads * sizes.channels, sizes.groups * sizes.channels
    inner = max((2 if sizes.gated else 1) * sizes.width, query + 2 * key_value)

    def mebibytes(elements: float) -> int:
        return (2 if half else 4) * math.ceil(elements / 2**20)

    # A sum is sent and received at a time.
    whole = mebibytes(rows * sizes.hidden) * (1 if spread else 2)
    stage = mebibytes(rows * sizes.hidden / (t if spread or x * y > 1 else 1))
    # An exchange of heads and positions, or keys and values that go around a ring.
    context = mebibytes(max(rows * max(sizes.hidden, query), 2 * rows * key_value) / t)
    found = dict.fromkeys(("mp", "tp_ep_pp", "tp_cp"), SMALL)
    found |= {"tp": whole, "tp.together": whole}
    found |= {"tp2d.x": mebibytes(rows * sizes.hidden / y), "tp2d.y": mebibytes(rows * inner / x)}
    found |= dict.fromkeys(("pp", "pp.up", "pp.down"), stage)
    found |= dict.fromkeys(("cp", "cp.inner", "cp.outer", "cp.across", "cp.second"), context)
    factor = getattr(args, "hccl_ep_group_buffer_adaptive_factor", -1.0)
    if factor > 0 and getattr(args, "num_experts", None):
        sent = factor * rows / t * sizes.hidden
        found["ep"] = mebibytes(sent * getattr(args, "moe_router_topk", 2))
        if getattr(args, "moe_token_dispatcher_type", "allgather") == "allgather":
            found["tp_ep_mp"] = mebibytes(sent * t * getattr(args, "expert_model_parallel_size", 1))
    return found


def buffer_sizes(args: Any) -> dict[str, int]:
    """Return the mebibytes of groups by name: those that are given, and else what messages need."""
    adaptive = adaptive_sizes(args) if args.hccl_group_buffer_adaptive else {}
    return adaptive | dict(args.hccl_group_buffer or ())


def expansion_modes(args: Any) -> dict[str, int]:
    """Return the number of ``hccl_op_expansion_mode`` of groups by name."""
    return dict(args.hccl_op_mode or ())
