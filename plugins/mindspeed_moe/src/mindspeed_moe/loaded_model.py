"""Head of a file of loads: its run, from arguments, configuration and groups."""

from __future__ import annotations

from typing import Any

from mindspeed_moe.load_log import LoadedModel
from mindspeed_moe.plan_choice import exchanged, node_size


def loaded_model(args: Any, config: Any, pg: Any) -> LoadedModel:
    """Return the description of a model whose experts are spread over ``pg.ep``."""
    sizes, ranks = exchanged(args), pg.ep.size()
    nodes = min(node_size(args), ranks)
    return LoadedModel(
        experts=config.num_moe_experts,
        ranks=ranks,
        node_size=nodes if ranks % nodes == 0 else ranks,
        choices=config.moe_router_topk,
        gathering_ranks=pg.tp_ep.size(),
        tokens=sizes.tokens,
        row_bytes=sizes.row_bytes,
        prob_bytes=sizes.prob_bytes,
        reached=sizes.reached,
        dispatcher=config.moe_token_dispatcher_type,
    )
