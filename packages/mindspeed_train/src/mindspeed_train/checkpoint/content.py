"""The content of a checkpoint: the sharded state of model, optimizer, features and random generators.

The same function describes what is saved and the template that is loaded, so that both always agree. Keys
are those of Megatron-LM's checkpoints where it has them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata as distributions
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from mindspeed_core.errors import CheckpointError
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_megatron import optimizer_state
from mindspeed_megatron.model_state import Selection
from mindspeed_train.checkpoint import megatron_lm, rng_state
from mindspeed_train.fault_tolerance.bad_steps import BadSteps

if TYPE_CHECKING:
    from mindspeed_core.run import Run

CHECKPOINT_VERSION = 3.0
_LIBRARIES = ("torch", "megatron-core", "mindspeed-core")
_PLAIN = (type(None), bool, int, float, str, torch.Tensor, torch.dtype, torch.Size, Namespace)


@dataclass
class LoadedBatch:
    """The ``--micro-batch-size`` in which a loaded checkpoint counts; None where nothing was resumed."""

    micro_batch_size: int | None = None


def layout_metadata(run: Run, *, sharding: str = "fully_reshardable") -> dict[str, Any]:
    """Describe how state is laid out in the file, in the terms of megatron-core.

    ``sharding`` is that of the distributed optimizer's state; any layout can load ``fully_reshardable``.
    """
    described: dict[str, Any] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": run.pg.dp_cp,
    }
    if getattr(run.args, "use_distributed_optimizer", False):
        described["distrib_optim_sharding_type"] = sharding
        described["distrib_optim_fully_reshardable_mem_efficient"] = False
    return described


def without_groups(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of `layout_metadata` that goes into the file."""
    return {key: value for key, value in described.items() if key != "dp_cp_group"}


def layout(run: Run) -> dict[str, int]:
    """Return the sizes of the parallel dimensions."""
    groups = {name: getattr(run.pg, name, None) for name in ("tp", "pp", "cp", "dp", "ep")}
    sizes = {name: 1 if group is None else int(group.size()) for name, group in groups.items()}
    sizes["vp"] = len(run.model)
    return sizes


def versions(run: Run) -> dict[str, str]:
    """Return the versions of the libraries that write or read a checkpoint, and of the plan's plugins."""
    found = {}
    for name in (*_LIBRARIES, *(feature.dist for feature in run.session.plan.features)):
        try:
            found[name] = _version(name)
        except distributions.PackageNotFoundError:
            continue
    return found


@cache
def _version(name: str) -> str:
    # Reading a package's metadata takes milliseconds, and training waits.
    return distributions.version(name)


def sharded_state(
    run: Run,
    described: Mapping[str, Any],
    weights: Selection,
    *,
    is_loading: bool,
    with_optimizer: bool,
    with_rng: bool,
    features: Mapping[str, Any],
) -> dict[str, Any]:
    """Return everything sharded, to save or as the template of a load. Collective.

    ``described`` comes from `layout_metadata`, ``weights`` from `model_state.select`, ``features`` from
    `feature_parts`.
    """
    state: dict[str, Any] = dict(weights.chosen)
    if with_optimizer and run.optimizer is not None:
        state["optimizer"] = optimizer_state.sharded_state(
            run.optimizer, weights.described(), described, is_loading=is_loading
        )
    if with_rng:
        state["rng_state"] = _rng_object(run)
    if features:
        state["features"] = dict(features)
    return state


def common_state(run: Run) -> dict[str, Any]:
    """Return what every rank holds alike: counters and the schedule."""
    state: dict[str, Any] = {
        "iteration": run.iteration,
        "checkpoint_version": CHECKPOINT_VERSION,
        "consumed_train_samples": run.consumed_train_samples,
        "consumed_valid_samples": run.consumed_valid_samples,
        "micro_batch_size": run.args.micro_batch_size,
        "layout": layout(run),
        "args": megatron_lm.arguments(run, layout(run)),
        "bad_steps": run.session.state(BadSteps).state(),
    }
    if run.scheduler is not None:
        state["opt_param_scheduler"] = run.scheduler.state_dict()
    return state


def _rng_object(run: Run) -> ShardedObject:
    pg = run.pg
    state: list[Any] = [rng_state.capture(run.session.platform)]
    if run.args.data_parallel_random_init:
        # Megatron-LM's form: the states of all data-parallel ranks in one list.
        state = all_gather_values(state[0], pg.dp)
    groups, replica = [pg.pp, pg.tp], pg.dp_cp.rank()
    if layout(run)["ep"] > 1:
        # Expert-parallel generators differ along the data-parallel ranks.
        groups, replica = [*groups, pg.dp_cp], 0
    shape = tuple(group.size() for group in groups)
    offset = tuple(group.rank() for group in groups)
    return ShardedObject("rng_state", state, shape, offset, replica_id=replica)


def own_rng(run: Run, states: list[Any]) -> Any:
    """Return this rank's random states from the list of a checkpoint: one for all ranks or one for each."""
    return states[run.pg.dp.rank()] if len(states) == run.pg.dp.size() > 1 else states[0]


def rng_fits(run: Run, saved: Mapping[str, int]) -> bool:
    """Return whether the random states of a checkpoint with that layout belong to the ranks of this run."""
    now = layout(run)
    names = ["tp", "pp"]
    if now["ep"] > 1 or saved.get("ep", 1) > 1:
        names += ["ep", "dp", "cp"]
    if run.args.data_parallel_random_init:
        names.append("dp")
    return all(saved.get(name, 1) == now[name] for name in names)


def check_plain(value: Any, path: str = "") -> None:
    """Refuse a value that could not be read back without unpickling classes.

    Raises:
        CheckpointError: names where it is.
    """
    for where, leaf in _leaves(value, path):
        if not isinstance(leaf, _PLAIN):
            owner = where.split(".")
            who = f"feature {owner[1]!r}: " if owner[0] == "features" and len(owner) > 1 else ""
            raise CheckpointError(
                f"{who}checkpoint state {where or 'as a whole'} is a {type(leaf).__name__}; only tensors, "
                "numbers, strings, lists, tuples and dictionaries are saved"
            )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if type(value) is dict:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value
