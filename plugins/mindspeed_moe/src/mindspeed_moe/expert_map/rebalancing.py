"""Experts that move between ranks during a run, so that ranks compute about as many rows.

Loads are counted per step and summed over ranks as integers, so that every rank has the same numbers and
makes the same plan without a further message. Checkpoints hold experts where megatron-core puts them: they
are brought home before a save, and back after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.utils import get_pg_rank

from mindspeed_core.errors import SessionError
from mindspeed_megatron.spared_failures import SparedFailures
from mindspeed_megatron.unwrap import unwrap
from mindspeed_moe.expert_map.layer_map import LayerMap
from mindspeed_moe.expert_map.migration import Moves, migrate
from mindspeed_moe.expert_map.planning import Placement, balance, greedy_placement, rank_loads, variation
from mindspeed_moe.expert_map.slots import (
    STATES,
    Part,
    Slot,
    gradient_part,
    optimizer_part,
    slots_of,
    weight,
)
from mindspeed_moe.layer import LaunchedMoELayer

if TYPE_CHECKING:
    from mindspeed_core.run import Run

_KEPT = 0.9


@dataclass(frozen=True)
class Frequency:
    """Conditions under which experts move.

    Attributes:
        steps: between two plans.
        threshold: a layer's experts move only if the coefficient of variation of the loads of ranks falls by
            so much; None for whenever the largest load falls.
        prints: print loads and plans.
    """

    steps: int
    threshold: float | None
    prints: bool


class Layer:
    """The experts of one layer on this rank.

    Attributes:
        key: of the layer in the whole model.
        map: from experts to slots.
        loads: of each expert, weighted means of the rows of past steps.
        target: the placement to return to after a save or a load.
    """

    def __init__(self, key: str, module: LaunchedMoELayer) -> None:
        """Begin without any load.

        Args:
            key: of the layer in the whole model.
            module: the layer.
        """
        assert module.expert_map is not None
        self.key = key
        self.module: Any = module
        self.map: LayerMap = module.expert_map
        self.loads = [0.0] * int(module.config.num_moe_experts or 0)
        self.target: Placement | None = None
        self.kinds: list[list[Slot]] = slots_of(module.experts)

    def learn(self, counts: Sequence[int]) -> None:
        """Add the rows of one step to the loads."""
        self.loads = [_KEPT * load + (1 - _KEPT) * count for load, count in zip(self.loads, counts)]

    def planned(self, frequency: Frequency) -> Placement:
        """Return where the experts should be; where they are, if nothing is gained."""
        now = self.map.placement
        found = greedy_placement(self.loads, len(now), now)
        gain = variation(self.loads, now) - variation(self.loads, found)
        return now if frequency.threshold is not None and gain < frequency.threshold else found


class Rebalancing:
    """The experts of a run's layers, and where they are.

    Attributes:
        moves: how many layers have moved their experts in this session.
    """

    def __init__(self, run: Run, frequency: Frequency) -> None:
        """Find the layers of a built model.

        Args:
            run: the run in progress.
            frequency: when experts move.

        Raises:
            SessionError: the model has no layer whose experts can move.
        """
        self._run = run
        self._frequency = frequency
        self._steps = 0
        self._pending: list[torch.Tensor] = []
        self.moves = 0
        self._layers = [
            Layer(_key(name, module), module)
            for chunk in run.model
            for name, module in unwrap(chunk).named_modules()
            if isinstance(module, LaunchedMoELayer) and module.expert_map is not None
        ]
        for layer in self._layers:
            for kind in layer.kinds:
                _describe_gradients(self, layer, kind)

    def after_update(self) -> None:
        """Count the step, and move experts where it is time; collective."""
        if not self._layers:
            return
        rows = [layer.map.take_counts() for layer in self._layers]
        self._pending.append(
            torch.stack(
                [
                    torch.zeros(len(layer.loads), dtype=torch.int64, device=_device(layer))
                    if row is None
                    else row.to(torch.int64)
                    for layer, row in zip(self._layers, rows)
                ]
            )
        )
        self._steps += 1
        if self._steps < self._frequency.steps:
            return
        self._steps = 0
        self._learn()
        plans = [layer.planned(self._frequency) for layer in self._layers]
        if self._frequency.prints:
            self._print(plans)
        changed = [one for one in zip(self._layers, plans) if one[0].map.placement != one[1]]
        if changed:
            # The next forward pass would have gathered them late.
            self._run.complete_parameters()
        for layer, plan in changed:
            self._move(layer, plan)
            self.moves += 1

    def go_home(self) -> None:
        """Bring every expert to where megatron-core puts it; parameters are complete."""
        for layer in self._layers:
            layer.target = layer.map.placement
            self._move(layer, layer.map.home)

    def return_from_home(self) -> None:
        """Bring experts back to where they were before `go_home`, or in the run that is resumed."""
        for layer in self._layers:
            target, layer.target = layer.target, None
            if target is not None:
                self._move(layer, target)

    def state(self) -> dict[str, Any]:
        """Return loads and placements for a checkpoint; collective."""
        if not self._layers:
            return {"steps": self._steps, "ranks": self._ranks}
        self._learn()
        replica = get_pg_rank(self._run.pg.tp_dp_cp)
        found: dict[str, Any] = {"steps": self._steps, "ranks": self._ranks}
        for layer in self._layers:
            placement = layer.target or layer.map.placement
            order = [expert for experts in placement for expert in experts]
            values = torch.tensor([layer.loads, order], dtype=torch.float64, device=_device(layer))
            found[layer.key] = ShardedTensor.from_rank_offsets(layer.key, values, replica_id=replica)
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take loads over, and placements if experts are spread over as many ranks.

        What was just loaded lies where megatron-core puts it.
        """
        self._steps = int(state.get("steps", 0))
        self._pending = []
        for layer in self._layers:
            layer.map.take_counts()
            layer.map.place(layer.map.home)
            layer.target = None
            if layer.key not in state:
                continue
            loads, order = state[layer.key].tolist()
            layer.loads = loads
            if int(state.get("ranks", 0)) == self._ranks:
                slots = len(layer.map.home[0])
                experts = [int(expert) for expert in order]
                layer.target = [experts[first : first + slots] for first in range(0, len(experts), slots)]

    @property
    def _ranks(self) -> int:
        size: int = self._run.pg.ep.size()
        return size

    def _learn(self) -> None:
        """Add up the rows of the steps since the last call over all ranks that share these layers."""
        if not self._pending:
            return
        counts, self._pending = torch.stack(self._pending), []
        dist.all_reduce(counts, group=self._run.pg.tp_dp_cp)
        if self._run.session.platform.dry_run:
            # There are no rows to count; a dry run takes them as even, and then nothing moves.
            return
        for of_step in counts.tolist():
            for layer, row in zip(self._layers, of_step):
                layer.learn(row)

    def _move(self, layer: Layer, placement: Placement) -> None:
        before = layer.map.placement
        if before == placement:
            return
        moves = Moves(before, placement, self._run.pg.ep.rank())
        migrate(layer.kinds, moves, self._parts, self._run.pg.ep)
        layer.map.place(placement)

    def _parts(self, parameter: torch.nn.Parameter) -> list[Part]:
        optimizer = self._run.optimizer
        part = optimizer_part(optimizer, _kept(optimizer), parameter) if optimizer is not None else None
        return [weight(parameter), *([part] if part is not None else [])]

    def _print(self, plans: Sequence[Placement]) -> None:
        if get_pg_rank(self._run.pg.tp_dp_cp):
            return
        for layer, plan in zip(self._layers, plans):
            ratios = balance(layer.loads, layer.map.placement, plan)
            rows = " ".join(f"{load:.0f}" for load in rank_loads(layer.loads, layer.map.placement))
            moved = sum(
                old != new
                for before, after in zip(layer.map.placement, plan)
                for old, new in zip(before, after)
            )
            self._run.session.state(SparedFailures).say(
                f"mindspeed: {layer.key}: rows of each rank {rows}, largest / mean {ratios.before:.2f}; "
                f"{moved} experts move, then {ratios.after:.2f} (at best {ratios.bound:.2f})"
            )


def _describe_gradients(owner: Rebalancing, layer: Layer, kind: list[Slot]) -> None:
    """Let whoever compares layouts see gradients where checkpoints have their experts."""
    at_home: dict[torch.nn.Parameter, torch.Tensor] = {}

    def gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter not in at_home:
            at_home.update(_gradients_at_home(owner, layer, kind))
        return at_home.pop(parameter)

    for parameter in {slot.parameter: None for slot in kind}:
        parameter.canonical_grad = partial(gradient, parameter)  # type: ignore[attr-defined]


def _gradients_at_home(
    owner: Rebalancing, layer: Layer, kind: list[Slot]
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    run = owner._run
    parameters = {slot.parameter: None for slot in kind}
    found = {parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters}

    def parts(parameter: torch.nn.Parameter) -> list[Part]:
        return [gradient_part(run.optimizer, parameter)]

    def into(parameter: torch.nn.Parameter) -> list[Part]:
        return [Part(0, (found[parameter].view(-1),))]

    # Those that stay move too: the shards of a distributed optimizer are put together.
    moves = Moves(layer.map.placement, layer.map.home, run.pg.ep.rank(), all_of_them=True)
    migrate([kind], moves, parts, run.pg.ep, into=into)
    yield from found.items()


def _key(name: str, module: LaunchedMoELayer) -> str:
    """Return the name of a layer in the whole model, whichever pipeline stage holds it."""
    prediction = re.search(r"mtp\.layers\.(\d+)\.", name)
    return f"mtp{prediction[1]}" if prediction else f"layer{module.layer_number}"


def _kept(optimizer: Any) -> tuple[str, ...]:
    """Return what the optimizer keeps of each element; in a library session no flag says which one it is.

    Raises:
        SessionError: it keeps what does not move.
    """
    config = getattr(optimizer, "config", None)
    kind = str(getattr(config, "optimizer", "adam"))
    for option in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if getattr(config, option, False):
            kind = f"{kind} with {option}"
    if kind not in STATES:
        raise SessionError(
            f"--enable-expert-placement: what the optimizer {kind} keeps of experts does not move with them; "
            "use adam or sgd without that, or drop --enable-expert-placement"
        )
    return STATES[kind]


def _device(layer: Layer) -> torch.device:
    device: torch.device = layer.kinds[0][0].parameter.device
    return device


def rebalancing(run: Run, frequency: Frequency) -> Rebalancing:
    """Return the experts of a run with a model.

    Raises:
        SessionError: experts cannot move, or there are none.
    """
    if not run.model:
        raise SessionError(
            "--enable-expert-placement moves experts of a wrapped model; pass it to wrap_ddp or "
            "wrap_optimizer first"
        )
    return Rebalancing(run, frequency)
