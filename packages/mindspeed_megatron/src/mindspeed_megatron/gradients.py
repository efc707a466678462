"""Default of the reductions that complete the gradients of a step."""

from __future__ import annotations

from inspect import signature

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from mindspeed_core.feature import hookimpl
from mindspeed_core.hooks import DONE, Done

_FINALIZE_TAKES = frozenset(signature(finalize_model_grads).parameters)
"""megatron-core 0.15 has neither process groups nor a forced all-reduce here."""


@hookimpl(trylast=True)
def finalize_gradients(
    model: list[MegatronModule],
    num_tokens: torch.Tensor | None,
    pg: ProcessGroupCollection | None,
    force_all_reduce: bool,
) -> Done:
    """Reduce the gradients over data, sequence and embedding groups, as megatron-core does."""
    options = {"pg_collection": pg, "force_all_reduce": force_all_reduce}
    finalize_model_grads(
        model, num_tokens, **{name: options[name] for name in options if name in _FINALIZE_TAKES}
    )
    return DONE
