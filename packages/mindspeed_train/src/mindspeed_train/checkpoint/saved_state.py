"""The state that a save holds: all that is kept of a run, described, and its small parts serialized."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)

from mindspeed_megatron import model_record, model_state, optimizer_state
from mindspeed_megatron.feature_state import feature_parts
from mindspeed_megatron.launch.environment import current_job
from mindspeed_megatron.model_record import describe_run, softmax_size
from mindspeed_train.checkpoint import content as checkpoint_content
from mindspeed_train.checkpoint import manifests
from mindspeed_train.checkpoint.collective import on_all_ranks
from mindspeed_train.checkpoint.model_arguments import model_arguments
from mindspeed_train.checkpoint.shard_files import ShardFile
from mindspeed_train.checkpoint.shard_plan import Layout, layout_of
from mindspeed_train.data.identity import TrainingData

if TYPE_CHECKING:
    from mindspeed_core.run import Run

_COMMON = "common.pt"


@dataclass(frozen=True)
class SavedState:
    """State that a rank saves: its shards, and on rank 0 in a file the state that all ranks hold alike."""

    sharded: Any
    shards: list[Any]
    layout: Layout
    common: Mapping[str, Any]
    common_files: list[ShardFile]
    manifest: manifests.Manifest


def collect_state(run: Run) -> SavedState:
    """Describe everything that is saved, and serialize what is small. Collective for some optimizers."""
    described = checkpoint_content.layout_metadata(run)
    features = feature_parts(run)
    weights = select_saved(run, described)
    try:
        state = checkpoint_content.sharded_state(
            run,
            described,
            weights,
            is_loading=False,
            with_optimizer=not run.args.no_save_optim,
            with_rng=not run.args.no_save_rng,
            features=features,
        )
    finally:
        if run.optimizer is not None:
            optimizer_state.forget_overrides(run.optimizer)
    state.update(checkpoint_content.common_state(run))
    state["features"] = {**state.get("features", {}), model_record.KEY: describe_run(run).as_dict()}
    state["content_metadata"] = checkpoint_content.without_groups(described)
    # Whether the shards of all ranks make up whole tensors is checked with the plan.
    sharded, common = split(state)
    checkpoint_content.check_plain(common)
    common_files = []
    if dist.get_rank() == 0:
        serialized = io.BytesIO()
        torch.save(common, serialized)
        common_files.append(ShardFile(_COMMON, [(serialized.getvalue(),)]))
    shards = list(nested_values(sharded))
    return SavedState(
        sharded,
        shards,
        layout_of(shards),
        common,
        common_files,
        _manifest(run, tuple(features)),
    )


def split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sharded part of a state and the rest, with factories built and what is not kept left out.

    The same as ``megatron.core.dist_checkpointing.state_dict_utils.save_preprocess`` without its checks, in
    one pass: training waits for it.
    """
    sharded: dict[Any, Any] = {}
    common: dict[Any, Any] = {}
    for key, value in state.items():
        _put(value, partial(sharded.__setitem__, key), partial(common.__setitem__, key))
    return sharded, common


def _put(value: Any, into_sharded: Callable[[Any], None], into_common: Callable[[Any], None]) -> None:
    if isinstance(value, ShardedTensorFactory):
        value = value.build()
    if isinstance(value, (dict, list)) and value:
        sharded: Any
        common: Any
        if isinstance(value, dict):
            sharded, common = split(value)
        else:
            sharded, common = [], []
            for item in value:
                _put(item, sharded.append, common.append)
        if sharded:
            into_sharded(sharded)
        if common:
            into_common(common)
    elif isinstance(value, ShardedBase):
        part = value.flattened_range if isinstance(value, ShardedTensor) else None
        if part is None or part.start != part.stop:
            into_sharded(value)
    elif not isinstance(value, LocalNonpersistentObject):
        into_common(value)


def _manifest(run: Run, features: tuple[str, ...]) -> manifests.Manifest:
    return manifests.Manifest(
        iteration=run.iteration,
        files={},
        plan=run.session.plan.as_dict(),
        versions=checkpoint_content.versions(run),
        layout=checkpoint_content.layout(run),
        model={**model_arguments(run.args), "softmax_vocab_size": softmax_size(describe_run(run))},
        features=features,
        job=current_job().name,
        data=run.session.state(TrainingData).record,
    )


def select_saved(run: Run, described: Mapping[str, Any]) -> model_state.Selection:
    """Return the weights that a save holds; collective where a feature chooses them.

    Raises:
        CheckpointError: a feature leaves weights out that are trained.
    """
    weights = model_state.select(run, described)
    if weights.chosen is not weights.all:
        on_all_ranks(f"--save {run.args.save}", lambda: model_state.check_saved(run, weights))
    return weights
