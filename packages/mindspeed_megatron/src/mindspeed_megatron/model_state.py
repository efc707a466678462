"""The weights in a checkpoint: the part of the model that is saved, and the part that a load fills.

Features choose both in the stage `model_state`. What they leave out must come from somewhere else: weights
that were trained are never left out of what is saved, and after a load every weight has got its value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import CheckpointError
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.run import Run

State = dict[str, dict[str, Any]]
"""Sharded state of each chunk by its key, each by the name of the weight in the chunk."""


@dataclass
class LoadedWeights:
    """Names of the weights of this rank that a checkpoint or a feature has filled, by key of their chunk."""

    names: dict[str, set[str]] = field(default_factory=dict)

    def add(self, key: str, names: set[str]) -> None:
        """Count weights of a chunk as filled."""
        self.names.setdefault(key, set()).update(names)


def model_keys(run: Run) -> list[str]:
    """Return the key of each chunk: ``model``, or ``model0``, ``model1``, … with virtual stages."""
    if len(run.model) == 1:
        return ["model"]
    return [f"model{index}" for index in range(len(run.model))]


@hookimpl(trylast=True)
def model_state(run: Run, metadata: Mapping[str, Any]) -> State:
    """Describe every weight of every chunk, unwrapped: the wrapper's keys would not be found again."""
    return {
        key: unwrap(chunk).sharded_state_dict(metadata=dict(metadata))
        for key, chunk in zip(model_keys(run), run.model)
    }


@dataclass(frozen=True)
class Selection:
    """The weights that features chose, and all of them.

    Attributes:
        chosen: the result of the stage.
        all: every weight of the model.
    """

    chosen: State
    all: State

    @property
    def is_whole(self) -> bool:
        """Return whether nothing was left out."""
        return not any(self.left_out().values())

    def described(self) -> State:
        """Return every weight, described as features want it where they chose it: for the optimizer."""
        return {key: {**whole, **self.chosen.get(key, {})} for key, whole in self.all.items()}

    def left_out(self) -> dict[str, set[str]]:
        """Return the names of the weights that were not chosen, by key of their chunk."""
        return {key: _weights(whole) - set(self.chosen.get(key, {})) for key, whole in self.all.items()}


def is_chosen(run: Run) -> bool:
    """Return whether a feature chooses the weights; the same on every rank."""
    return bool(_owners(run))


def select(run: Run, metadata: Mapping[str, Any], source: str | None = None) -> Selection:
    """Run the stage `model_state`.

    Args:
        run: the run in progress.
        metadata: how state is laid out, in megatron-core's terms.
        source: None for the run's own checkpoints, otherwise the folder that is loaded.

    Raises:
        CheckpointError: a feature describes something that is no weight of the model.
    """
    session = run.session
    chosen: State = session.call("model_state", run=run, source=source, metadata=metadata)
    if not is_chosen(run):
        return Selection(chosen, chosen)
    selection = Selection(chosen, session.default("model_state", run=run, source=source, metadata=metadata))
    for key, part in chosen.items():
        unknown = sorted(set(part) - set(selection.all.get(key, {})))
        if unknown:
            raise CheckpointError(
                f"{_owners(run)}: model_state describes {unknown[0]!r} in {key!r}, which is no weight of "
                "the model; state of a feature's own goes into the stage checkpoint_state"
            )
    return selection


def check_saved(run: Run, selection: Selection) -> None:
    """Refuse to save less than what is trained.

    Raises:
        CheckpointError: names a trained weight that was left out, and the feature.
    """
    for (key, names), chunk in zip(selection.left_out().items(), run.model):
        parameters = dict(unwrap(chunk).named_parameters(remove_duplicate=False))
        trained = sorted(name for name in names if name in parameters and parameters[name].requires_grad)
        if trained:
            raise CheckpointError(
                f"{_owners(run)}: model_state leaves {len(trained)} weights out of the checkpoint that are "
                f"trained, first {trained[0]!r} of {key!r}; keep them, or freeze them (requires_grad)"
            )


def load_weights(run: Run, selection: Selection, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Give the chosen weights their loaded values.

    Args:
        run: the run in progress.
        selection: what was chosen for this load.
        state: the filled template by key of the chunk.
    """
    loaded = run.session.state(LoadedWeights)
    for key, chunk in zip(model_keys(run), run.model):
        part = state.get(key, {})
        unwrap(chunk).load_state_dict(part, strict=selection.is_whole)
        loaded.add(key, _weights(part))


def count_as_loaded(run: Run, chosen: Callable[[str], bool] = lambda name: True) -> None:
    """Say that weights have their values from elsewhere than a checkpoint: a file that a feature reads.

    Args:
        run: the run in progress.
        chosen: whether the weight with this name, in the chunk's ``state_dict``, is one of them.
    """
    loaded = run.session.state(LoadedWeights)
    for key, chunk in zip(model_keys(run), run.model):
        loaded.add(key, {name for name in unwrap(chunk).state_dict() if chosen(name)})


def check_loaded(run: Run, selection: Selection, where: str) -> None:
    """Refuse to go on with weights that no load has filled.

    Args:
        run: the run in progress.
        selection: what was chosen for the run's own checkpoint.
        where: that checkpoint.

    Raises:
        CheckpointError: names a weight without a value, and the feature.
    """
    loaded = run.session.state(LoadedWeights).names
    for key, whole in selection.all.items():
        empty = sorted(_weights(whole) - loaded.get(key, set()))
        if empty:
            raise CheckpointError(
                f"{where}: {len(empty)} weights of the model are not loaded from there, because "
                f"{_owners(run)} leaves them out, and from nowhere else, first {empty[0]!r} of {key!r}; "
                "load them first with the stage load_checkpoint(source=...), or say with "
                "mindspeed_megatron.model_state.count_as_loaded that they have their values"
            )


def _weights(part: Mapping[str, Any]) -> set[str]:
    return {name for name in part if not name.endswith("_extra_state")}


def _owners(run: Run) -> str:
    session = run.session
    found = [name for name in session.implementations("model_state") if not name.startswith("host ")]
    return ", ".join(found)
