"""Muon over whatever this rank holds of each matrix, and Adam or Lion for everything else.

Momentum lies where Adam's moments would lie, so it is sharded, saved and loaded as they are, as ``exp_avg``.
Only for the update do the shards of a matrix meet, on one of the ranks that hold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_core import DescribedOptimizer
from mindspeed_megatron.described_optimizer import MOMENTS, local_part
from mindspeed_optim.muon.exchange import Exchange
from mindspeed_optim.muon.matrices import Matrices, Matrix, matrices_of
from mindspeed_optim.muon.options import ADAM, MuonOptions
from mindspeed_optim.muon.tensor_parallel import orthogonalized
from mindspeed_optim.rules.fused_adamw import fused_kernel

_MOMENTUM = MOMENTS[0]


@dataclass(frozen=True)
class _Plan:
    """Matrices of an optimizer, and the way in which their shards meet.

    Attributes:
        matrices: by the model's parameter, in an order that all ranks share.
        numbers: the place of each parameter in that order.
        exchange: how their shards meet; None where each rank has whole matrices.
    """

    matrices: Mapping[torch.Tensor, Matrix]
    numbers: Mapping[torch.Tensor, int]
    exchange: Exchange | None


class Muon(DescribedOptimizer):
    """Momentum, orthogonalized matrix by matrix.

    The state of a matrix is ``exp_avg``; of what Adam updates both moments, of what Lion updates the first.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        options: MuonOptions,
        matrices: Matrices,
        *,
        decoupled: bool = True,
    ) -> None:
        """Take megatron-core's groups of parameters.

        Args:
            param_groups: the groups.
            options: of the rule.
            matrices: tells which parameters are matrices.
            decoupled: weight decay of Adam is AdamW's; that of matrices and of Lion always is.
        """
        self.options = options
        self._recognised = matrices
        self._decoupled = decoupled
        self._made: _Plan | None = None
        super().__init__(param_groups)

    @property
    def exchange(self) -> Exchange | None:
        """Return how shards of matrices meet; None where each rank has whole ones."""
        return self._plan.exchange

    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return momentum of zeros, and what Adam needs besides where it makes the update."""
        adam = self._matrix(parameter) is None and self.options.scalar == ADAM
        return {name: torch.zeros_like(parameter) for name in (MOMENTS if adam else MOMENTS[:1])}

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> None:
        """Update one parameter by itself, of which this rank has everything."""
        matrix = self._matrix(parameter)
        if matrix is None:
            self._update_others([parameter], [gradient], [state], group)
            return
        momentum = self._momentum(gradient, state)
        found = orthogonalized(momentum.reshape(matrix.part.shape), matrix, self.options)
        _apply(parameter, group, found)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter; collective over the ranks that share matrices."""
        if not self.parts.every:
            # Used without megatron-core: each parameter is whole, and nobody shares it.
            super().step()
            return
        plan = self._plan
        momenta: dict[int, torch.Tensor] = {}
        targets: dict[int, tuple[torch.Tensor, Mapping[str, Any]]] = {}
        for group in self.param_groups:
            group["step"] += 1
            others: list[torch.Tensor] = []
            for parameter in self._with_gradient(group):
                number = plan.numbers.get(self.part_of(parameter).parameter)  # type: ignore[arg-type]
                if number is None:
                    others.append(parameter)
                    continue
                gradient = local_part(parameter.grad)  # type: ignore[arg-type]
                momenta[number] = self._momentum(gradient, self.state_of(parameter)).view(-1)
                targets[number] = (local_part(parameter), group)
            self._update_others(
                [local_part(parameter) for parameter in others],
                [local_part(parameter.grad) for parameter in others],  # type: ignore[arg-type]
                [self.state_of(parameter) for parameter in others],
                group,
            )
        for number, found in self._orthogonalized(plan, momenta):
            _apply(*targets[number], found)

    def _with_gradient(self, group: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        """Yield the parameters of a group that are updated."""
        exchanged = self._plan.exchange is not None
        for parameter in group["params"]:
            if parameter.grad is None and exchanged and self._matrix(parameter) is not None:
                # The other ranks wait for its momentum; buffers have a gradient for everything.
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None and local_part(parameter).numel():
                yield parameter

    def _orthogonalized(
        self, plan: _Plan, momenta: Mapping[int, torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number of every matrix of which this rank has something, with its update."""
        matrices = list(plan.matrices.values())
        if plan.exchange is None:
            # In the order of all ranks, which share some of the matrices.
            for number in sorted(momenta):
                matrix = matrices[number]
                yield number, orthogonalized(momenta[number].view(matrix.part.shape), matrix, self.options)
            return
        like = self._like()
        wholes = plan.exchange.gather(momenta, like)
        done = {}
        for number in plan.exchange.owned:
            matrix = matrices[number]
            whole = wholes.pop(number).view(matrix.part.shape)
            done[number] = orthogonalized(whole, matrix, self.options).reshape(-1)
        yield from plan.exchange.scatter(done, like).items()

    def _momentum(self, gradient: torch.Tensor, state: Mapping[str, Any]) -> torch.Tensor:
        """Update the momentum, and return what is orthogonalized."""
        momentum: torch.Tensor = state[_MOMENTUM]
        momentum.lerp_(gradient, 1 - self.options.momentum)
        return gradient.lerp(momentum, self.options.momentum) if self.options.nesterov else momentum

    def _update_others(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        states: list[dict[str, Any]],
        group: Mapping[str, Any],
    ) -> None:
        """Update parameters that are no matrices."""
        if self.options.scalar == ADAM:
            moments = [[state[name] for state in states] for name in MOMENTS]
            fused_kernel(parameters, gradients, moments, group["step"], group, decoupled=self._decoupled)
            return
        beta1, beta2 = self.options.lion_betas
        for parameter, gradient, state in zip(parameters, gradients, states):
            momentum = state[_MOMENTUM]
            _apply(parameter, group, momentum.lerp(gradient, 1 - beta1).sign_())
            momentum.lerp_(gradient, 1 - beta2)

    def _matrix(self, parameter: torch.Tensor) -> Matrix | None:
        part = self.part_of(parameter)
        return (
            self._recognised.of(part) if part.parameter is None else self._plan.matrices.get(part.parameter)
        )

    def _like(self) -> torch.Tensor:
        """Return an empty float32 tensor on the device of the parameters, also where this rank has none."""
        found = next((p for group in self.param_groups for p in group["params"]), None)
        device = next(iter(self._plan.matrices)).device if found is None else found.device
        return torch.empty(0, dtype=torch.float32, device=device)

    @property
    def _plan(self) -> _Plan:
        """Return the plan, made when parts are known."""
        if self._made is None:
            matrices = matrices_of(self._recognised, self.parts.every)
            held = [self.parts.held(parameter) for parameter in matrices]
            group = next((holding.group for holding in held if holding.group is not None), None)
            exchange = None
            if group is not None and group.size() > 1:
                costs = [matrix.cost() for matrix in matrices.values()]
                exchange = Exchange(group, costs, [_holders(holding.ranges) for holding in held])
            numbers = {parameter: number for number, parameter in enumerate(matrices)}
            self._made = _Plan(matrices, numbers, exchange)
        return self._made


def _holders(ranges: Iterable[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    return {rank: (start, stop) for rank, (start, stop) in enumerate(ranges) if start < stop}


def _apply(parameter: torch.Tensor, group: Mapping[str, Any], direction: torch.Tensor) -> None:
    """Decay a parameter and move it against a direction, by the learning rate each."""
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.sub_(direction.reshape(parameter.shape), alpha=group["lr"])
