"""The declaration of moments that are compressed between updates."""

from __future__ import annotations

from mindspeed_core.feature import Feature, Flag, Proofs
from mindspeed_memory.features.block_optimizer import IN_BLOCKS
from mindspeed_memory.optim.options import COMPRESS

_FLAG = "--compress-optimizer"


class CompressOptimizer(Feature):
    """Moments with exponents in fewer bits."""

    name = COMPRESS
    family = "memory"
    summary = "Compress Adam's moments without loss between updates"
    stability = "prototype"
    flags = (Flag(_FLAG, help="Keep moments compressed, without loss, between updates."),)
    requires = (IN_BLOCKS,)
    slots = ("optimizer-state",)
    docs = "mindspeed_memory:docs/compress-optimizer.md"
    modes = ("train",)
    fake_tensors = False
    deterministic = True
    affects_checkpoint = False
    formulas = {
        "optimizer_bytes_per_parameter": "11.1 / (data_parallel_size if use_distributed_optimizer else 1)",
    }
    verify = Proofs("mindspeed_memory.features.optimizer_proofs:COMPRESS_PROOFS")
