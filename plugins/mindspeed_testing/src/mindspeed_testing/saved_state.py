"""State of features and of the optimizer as a checkpoint would hold it, without any parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_testing.canonical import CanonicalState, gather_entries, sharded_tensors

if TYPE_CHECKING:
    from mindspeed_core.run import Run


@dataclass(frozen=True)
class SavedState:
    """Contents of a checkpoint beside the parameters.

    Attributes:
        features: tensors and numbers of features, sharded or not; keys begin with ``features.NAME.``.
        texts: what else features keep, as text.
        optimizer: moments and main parameters.
    """

    features: CanonicalState
    texts: Mapping[str, str]
    optimizer: CanonicalState


def saved_state(run: Run, *, with_optimizer: bool) -> SavedState | None:
    """Gather what a checkpoint would hold now; collective, the result exists on rank 0 and is None elsewhere.

    Args:
        run: the run, with complete parameters.
        with_optimizer: gather the optimizer's state too.
    """
    from mindspeed_megatron import model_state, optimizer_state
    from mindspeed_megatron.feature_state import feature_parts
    from mindspeed_train import interface

    run.session.call("before_save_checkpoint", run=run)
    try:
        features = feature_parts(run)
        described = interface.layout_metadata(run)
        state = interface.sharded_state(
            run,
            described,
            model_state.select(run, described),
            is_loading=False,
            with_optimizer=with_optimizer,
            with_rng=False,
            features=features,
        )
        optimizer = gather_entries(run, sharded_tensors(state.get("optimizer", {})))
        tensors = gather_entries(run, sharded_tensors(features))
        plain = all_gather_values(dict(_plain(features, "features")))
    finally:
        if run.optimizer is not None:
            optimizer_state.forget_overrides(run.optimizer)
        run.session.call("after_load_checkpoint", run=run)
    if optimizer is None or tensors is None:
        return None
    numbers, texts = _together(plain)
    whole = CanonicalState(
        {**tensors.tensors, **numbers.tensors}, {**tensors.replica_error, **numbers.replica_error}
    )
    return SavedState(whole, texts, optimizer)


def _plain(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor | str]]:
    """Yield tensors, and numbers as tensors, and anything else as text, each under its path."""
    from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensorFactory

    if isinstance(value, ShardedObject):
        yield from _plain(value.data, value.unique_key)
    elif isinstance(value, (ShardedBase, ShardedTensorFactory)):
        return
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _plain(item, f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _plain(item, f"{path}[{index}]")
    elif isinstance(value, torch.Tensor):
        yield path, value.detach().to("cpu", copy=True)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        yield path, torch.tensor([value], dtype=torch.float64)
    else:
        yield path, repr(value)


def _together(ranks: list[dict[str, torch.Tensor | str]]) -> tuple[CanonicalState, dict[str, str]]:
    """Take each value from the first rank that has it; the checkpoint keeps one of all copies."""
    tensors: dict[str, torch.Tensor] = {}
    errors: dict[str, float] = {}
    texts: dict[str, str] = {}
    for rank in ranks:
        for key, value in rank.items():
            if isinstance(value, str):
                texts.setdefault(key, value)
                if texts[key] != value:
                    errors[key] = float("inf")
            elif key not in tensors:
                tensors[key] = value
            else:
                errors[key] = max(errors.get(key, 0.0), _apart(value, tensors[key]))
    return CanonicalState(tensors, errors), texts


def _apart(copy: torch.Tensor, first: torch.Tensor) -> float:
    from mindspeed_testing.compare import relative_error, same_bits

    if copy.shape != first.shape or copy.dtype != first.dtype:
        return float("inf")
    return 0.0 if same_bits(copy, first) else relative_error(copy, first)
