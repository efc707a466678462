"""Environment variables of a training, taken back when its session closes."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def set_device_connections(session: Session, args: Namespace) -> None:
    """Choose one hardware queue for tensor or context parallelism, unless the user has chosen.

    It keeps a layer's collectives ahead of the matmuls they overlap with; the device runtime reads it when it
    starts. Fully sharded parameters are gathered beside the computation instead.
    """
    fully_sharded = getattr(args, "use_torch_fsdp2", False) or getattr(args, "use_megatron_fsdp", False)
    shares_layers = max(args.tensor_model_parallel_size, args.context_parallel_size) > 1
    if shares_layers and not fully_sharded and _CONNECTIONS not in os.environ:
        session.setenv(_CONNECTIONS, "1")


def restore_attention_choice(session: Session) -> None:
    """Unset, when the session closes, the variables by which models choose TransformerEngine's attention.

    megatron-core sets them for the backend of a model, and insists on the same values for the next one.
    """
    unset = [name for name in _ATTENTION if name not in os.environ]
    session.at_close(lambda: [os.environ.pop(name, None) for name in unset])
