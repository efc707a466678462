"""Filling of a template from the shards of a distributed checkpoint whose common state is read already.

megatron-core's own entry point reads the common state from the file itself since 0.17; these are its steps
with that state given, from functions that every version has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity


def load_shards(template: dict[str, Any], path: Path, common: dict[str, Any]) -> dict[str, Any]:
    """Load what a template describes. Collective.

    Args:
        template: state with ``ShardedTensor``, ``ShardedObject`` and factories in place of values; changed.
        path: folder of the checkpoint, in the format ``torch_dist``.
        common: state that all ranks hold alike; what lies deeper is merged into it.

    Returns:
        The common state with everything that was loaded.

    Raises:
        megatron.core.dist_checkpointing.core.CheckpointingException: parts of a tensor overlap or lack.
    """
    force_all_tensors_to_non_fp8(template)
    state = dict(common)
    sharded, own, factories = load_preprocess(template)
    merge(state, own)
    sharded, _ = extract_sharded_base(sharded)
    validate_sharding_integrity(determine_global_metadata(sharded)[1])
    merge(state, TorchDistLoadShardedStrategy().load(sharded, path))
    merged: dict[str, Any] = apply_factory_merges(state, factories)
    return merged
