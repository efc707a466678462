"""The state of features in checkpoints, under the keys that the stage `checkpoint_state` documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensorFactory

from mindspeed_core.errors import CheckpointError

if TYPE_CHECKING:
    from mindspeed_core.run import Run


def feature_parts(run: Run) -> dict[str, Any]:
    """Return every active feature's own state by name, its shards under keys of their own.

    Raises:
        CheckpointError: two features contribute under one name.
    """
    parts: dict[str, Any] = {}
    for contributed in run.session.collect("checkpoint_state", run=run):
        for name, part in contributed.items():
            if name in parts:
                raise CheckpointError(f"two features contribute checkpoint state under the name {name!r}")
            parts[name] = _map_leaves(part, partial(_with_prefix, f"features.{name}."))
    return parts


def _with_prefix(prefix: str, leaf: Any) -> Any:
    if isinstance(leaf, (ShardedBase, ShardedTensorFactory)) and hasattr(leaf, "key"):
        # A copy: the feature may hand out the same description again.
        return replace(leaf, key=prefix + leaf.key)
    return leaf


def _map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _map_leaves(item, function) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_leaves(item, function) for item in value]
    return function(value)
