"""The base of update rules with a state of their own form.

megatron-core saves, loads and reshards the state of Adam: two float32 moments in the shape of their
parameter. An optimizer that describes its state in that form, and takes it back from there, fits wherever
Adam does, and its checkpoints are read under any layout and by other optimizers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter

from mindspeed_megatron.parameter_parts import Holding, ParameterPart, ParameterParts

MOMENTS = ("exp_avg", "exp_avg_sq")
"""megatron-core's names of the moments, which every checkpoint of an optimizer holds."""
_TAKEN = frozenset({*MOMENTS, "param", "fp32_param", "master_param", "step", "padding", "numel_unpadded"})


class DescribedOptimizer(torch.optim.Optimizer, ABC):
    """An update rule that is written for one parameter, with its state in any form.

    A subclass writes `new_state` and `update`. Where its state is not float32 tensors called ``exp_avg``,
    ``exp_avg_sq`` or as in ``further``, in the shape of their parameter, it also writes `describe` and
    `restore`.

    What is called a parameter here is what this rank updates: float32, detached, and under
    ``--use-distributed-optimizer`` or fully sharded data parallelism a part of a model's parameter, flat or
    cut by rows. A rule that does not work element by element asks `part_of` where a part lies in its
    parameter, and `held` who has the rest.

    ``group["step"]`` counts the updates, from 1 in the first.

    A rule over many parameters at once overrides `step` as well. Then it

    - adds one to ``group["step"]`` of every group, also where this rank has nothing to update,
    - leaves out parameters without a gradient, and those of which this rank has nothing (``numel() == 0``),
    - hands `local_part` of parameters and gradients to torch's functions over lists, which take no
      ``DTensor``, and gets states from `state_of`,
    - makes collective calls in one order on all ranks, by `ParameterParts.every`, also on a rank that has no
      part of anything.

    Attributes:
        parts: what everything that is updated is part of; known from `mindspeed_core.put_inside` on, before
            the first state is made.
    """

    further: ClassVar[tuple[str, ...]] = ()
    """Names of described tensors beside the two moments; they are saved under keys of their own."""
    counts: ClassVar[tuple[str, ...]] = ()
    """Names of whole numbers in groups of parameters, beside ``step``, that the rule counts up from 0; a run
    goes on from those of its checkpoint, and from 0 where that has none."""

    def __init__(self, param_groups: list[dict[str, Any]], defaults: Mapping[str, Any] | None = None) -> None:
        """Take over groups of parameters as they are; nothing is copied.

        Args:
            param_groups: megatron-core's, with ``lr`` and ``weight_decay`` as the schedule sets them.
            defaults: hyperparameters by name, set in every group. A checkpoint does not change them.

        Raises:
            TypeError: a name in ``further`` has another meaning in checkpoints.
        """
        clashing = sorted(_TAKEN.intersection(self.further))
        if clashing:
            raise TypeError(
                f"{type(self).__name__}.further: {', '.join(clashing)} have another meaning in checkpoints"
            )
        self.state_apart = False
        self.parts = ParameterParts()
        super().__init__(param_groups, dict(defaults or {}))

    @abstractmethod
    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state of a parameter before its first update.

        Args:
            parameter: what this rank has of it, in float32.
        """

    @abstractmethod
    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> None:
        """Update one parameter and its state, in place. Called without gradients being recorded.

        Args:
            parameter: what this rank has of it, in float32.
            gradient: reduced and clipped, in the shape of the parameter.
            state: what `new_state` or `restore` returned, as the last update left it.
            group: hyperparameters: ``lr``, ``weight_decay``, ``step`` and those of ``defaults``.
        """

    def describe(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """Return the state as tensors in the shape of the parameter, for a checkpoint.

        By default the state itself. A moment that is left out is saved as zeros.

        Args:
            parameter: what this rank has of it, in float32.
            state: its state.

        Returns:
            Tensors by name: ``exp_avg``, ``exp_avg_sq`` and those of ``further``.
        """
        return state

    def restore(self, parameter: torch.Tensor, described: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the state that `describe` described; by default those tensors that `new_state` has.

        A run resumes bit for bit where this is the exact inverse of `describe`.

        Args:
            parameter: what this rank has of it, in float32.
            described: float32 tensors in the shape of the parameter, both moments and those of ``further``;
                they may be kept. What the checkpoint lacks of ``further`` is as in a new state.
        """
        return {name: described[name] for name in self.new_state(parameter)}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the described tensors."""
        return (*MOMENTS, *self.further)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                own = self.local_part(parameter)
                if parameter.grad is not None and own.numel():
                    self.update(own, local_part(parameter.grad), self.state_of(parameter), group)

    def local_part(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of a parameter, as `update` gets it: detached, in the same memory.

        Args:
            parameter: one of this optimizer's.
        """
        own = local_part(parameter)
        setattr(own, _PART, self.parts.of(parameter))
        return own

    def part_of(self, parameter: torch.Tensor) -> ParameterPart:
        """Return where a parameter, as this rank has it, lies in the model's.

        Args:
            parameter: one of this optimizer's, or what `new_state`, `update`, `describe` and `restore` get.
        """
        found: ParameterPart | None = getattr(parameter, _PART, None)
        return self.parts.of(parameter) if found is None else found

    def held(self, parameter: torch.Tensor) -> Holding:
        """Return which ranks hold which ranges of a parameter; computed, nothing is exchanged.

        Args:
            parameter: one of this optimizer's, or one of the model's (`ParameterPart.parameter`).
        """
        return self.parts.held(parameter)

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state of a parameter, made where there is none.

        Args:
            parameter: one of this optimizer's.
        """
        state = self.state[parameter]
        if not state or _UNFINISHED in state:
            own = self.local_part(parameter)
            new = self.new_state(own)
            if state:
                fresh = self.describe(own, new)
                new = self.restore(own, {**{n: fresh[n].float() for n in self.further}, **state[_UNFINISHED]})
            self.state[parameter] = state = new
        return state

    def allocate(self) -> None:
        """Give every parameter its state, if it has none."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state_of(parameter)

    def described(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of a parameter in the form of checkpoints.

        Returns:
            For each of `names` a float32 tensor in the shape of what this rank has of the parameter.

        Raises:
            TypeError: `describe` returns something else.
        """
        own, kept = local_part(parameter), self.kept(parameter)
        return {
            name: kept[name] if name in kept else torch.zeros_like(own, dtype=torch.float32)
            for name in self.names
        }

    @torch.no_grad()
    def kept(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what `described` does, without the moments that are not kept."""
        own = self.local_part(parameter)
        found = self.describe(own, self.state_of(parameter))
        kind = type(self).__name__
        unknown = sorted(set(found) - set(self.names))
        if unknown:
            raise TypeError(
                f"{kind}: checkpoints know no {', '.join(unknown)}; describe returns exp_avg, exp_avg_sq and "
                f"what {kind}.further names"
            )
        missing = [name for name in self.further if name not in found]
        if missing:
            raise TypeError(f"{kind}.describe leaves out {', '.join(missing)}, which {kind}.further names")
        for name, tensor in found.items():
            if not isinstance(tensor, torch.Tensor) or tensor.shape != own.shape:
                shown = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise TypeError(f"{kind}.describe: {name} is {shown}, its parameter {list(own.shape)}")
        return {name: tensor.float() for name, tensor in found.items()}

    @torch.no_grad()
    def take(self, parameter: torch.Tensor, described: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of a parameter.

        Args:
            parameter: one of this optimizer's.
            described: tensors by name, both moments among them; others than `names` are ignored.
        """
        own = self.local_part(parameter)
        loaded = {
            name: local_part(described[name]).to(own.device, torch.float32, copy=True).reshape(own.shape)
            for name in self.names
            if name in described
        }
        # Where something is missing it comes from a new state, which may depend on parameters still to load.
        self.state[parameter] = (
            self.restore(own, loaded) if len(loaded) == len(self.names) else {_UNFINISHED: loaded}
        )

    def take_group(self, group: dict[str, Any], saved: Mapping[str, Any], step: float | None = None) -> None:
        """Take over what a checkpoint says of a group of parameters, but no hyperparameter of ``defaults``.

        Args:
            group: one of this optimizer's.
            saved: what was saved of it.
            step: number of updates so far, where ``saved`` does not tell.
        """
        kept = {"params", "step", "is_expert_parallel", *self.defaults}
        group.update(dict.fromkeys(self.counts, 0))
        group.update({key: value for key, value in saved.items() if key not in kept})
        group["step"] = int(saved.get("step") or 0) if step is None else int(step)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; parameters of the distributed optimizer are views, which torch's own check refuses."""
        param_group.update({"step": 0, **dict.fromkeys(self.counts, 0), **self.defaults})
        self.param_groups.append(param_group)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return groups and described state, in the form of torch's Adam.

        Under the distributed optimizer, which gets at tensors by itself, only groups and ``step``.
        """
        saved = super().state_dict()
        steps = [torch.tensor(float(group["step"])) for group in self.param_groups]
        if self.state_apart:
            # megatron-core asks for `step` alone, also on a rank whose part of the parameters is empty.
            return {**saved, "state": {0: {"step": steps[0]}}}
        state = {
            index: {**self._described_for_a_save(parameter), "step": step.clone()}
            for group, packed, step in zip(self.param_groups, saved["param_groups"], steps)
            for index, parameter in zip(packed["params"], group["params"])
        }
        return {**saved, "state": state}

    def _described_for_a_save(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.described(parameter)
        if isinstance(parameter, DTensor):
            return found
        return {name: for_a_save(one, parameter, self.state[parameter]) for name, one in found.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over groups and described state, of this optimizer or of torch's Adam."""
        state = state_dict["state"]
        steps = (
            [] if self.state_apart else [float(entry["step"]) for entry in state.values() if "step" in entry]
        )
        step = steps[0] if steps else None
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            self.take_group(group, saved, step)
            for index, parameter in zip(saved["params"], group["params"]):
                if MOMENTS[0] in state.get(index, {}):
                    self.take(parameter, state[index])


_UNFINISHED = "loaded in part"
_PART = "_parameter_part"


def for_a_save(described: torch.Tensor, parameter: torch.Tensor, state: Mapping[str, Any]) -> torch.Tensor:
    """Return a described tensor where it may wait for a save: where it lies, or on the host.

    A state of another form is made float32 for the save. On the device the copies of all parameters would
    take the memory that the form saves, so that each leaves it before the next one is made.

    Args:
        described: a tensor of `DescribedOptimizer.described`, or a main parameter.
        parameter: what is updated.
        state: its state.
    """
    kept = (tensor for tensor in (parameter, *tree_iter(dict(state))) if isinstance(tensor, torch.Tensor))
    storage = described.untyped_storage()._cdata
    return described if any(one.untyped_storage()._cdata == storage for one in kept) else described.cpu()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor, detached and in the same memory."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()
