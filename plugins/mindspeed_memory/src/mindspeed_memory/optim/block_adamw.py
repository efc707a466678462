"""AdamW that updates a model window by window, whatever the form and the place of what it keeps.

Each window is brought onto the device in float32, updated by torch's own AdamW, and brought back. So a main
parameter may be a float32 number or the weight with 16 further bits, moments may lie on the device, on the
host or compressed, and 16-bit gradients are made float32 for as long as a window takes. AdamW works element
by element: the numbers are those of torch's optimizer over whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from mindspeed_megatron.described_optimizer import MOMENTS, local_part
from mindspeed_megatron.main_parameters import MainParameterOptimizer
from mindspeed_memory.optim.options import SIGN, SPLIT, BlockOptions
from mindspeed_memory.optim.places import Device, Kept, Plain
from mindspeed_memory.optim.split_master import HALF_UP, join, split, unsplit
from mindspeed_memory.optim.transfers import Transfers
from mindspeed_memory.optim.windows import Piece, Window, cut, windows

MAIN, RESIDUAL, TIES = "main", "residual", "ties"
"""Keys of a state beside the moments: the float32 value; its lower half, and ties that were rounded up."""
AdamKernel = Callable[..., None]
"""Updates lists of parameters, gradients and both moments in place, with ``step`` (from 1) and ``group``."""
_FIRST, _SECOND = MOMENTS
_NO_SIGN = 0x7FFFFFFF


@dataclass(frozen=True)
class _Job:
    """A window of the parameters of one group."""

    group: Mapping[str, Any]
    parameters: Sequence[torch.Tensor]
    window: Window


@dataclass
class _Batch:
    """Arguments of one call of torch's AdamW, and the actions that follow it."""

    mains: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    moments: tuple[list[torch.Tensor], list[torch.Tensor]] = field(default_factory=lambda: ([], []))
    afterwards: list[Callable[[], None]] = field(default_factory=list)


class BlockAdamW(MainParameterOptimizer):
    """AdamW over windows of flat parameters; see the module.

    The state of a parameter holds ``exp_avg`` and ``exp_avg_sq``, and of one with 16 bits ``main``, or
    ``residual`` and ``ties``.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        options: BlockOptions,
        place: Device,
        *,
        decoupled: bool = True,
        kernel: AdamKernel | None = None,
    ) -> None:
        """Take megatron-core's groups of parameters.

        Args:
            param_groups: the groups.
            options: forms.
            place: where state lives between steps.
            decoupled: weight decay is AdamW's; otherwise it is added to the gradient, as in Adam.
            kernel: what computes the update of a window; None for torch's function, which ``decoupled``
                chooses.
        """
        self.options = options
        self.place = place
        self._rule = adamw if decoupled else adam
        self._kernel = kernel
        self._transfers: Transfers | None = None
        super().__init__(param_groups)

    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return moments of zeros, and the main parameter of one with 16 bits, equal to it."""
        size, device, part = parameter.numel(), parameter.device, self.part_of(parameter)
        state: dict[str, Any] = {name: self.place.zeros(name, size, device, part) for name in MOMENTS}
        if parameter.dtype == torch.float32:
            return state
        if self.options.master == SPLIT:
            residual = torch.empty(size, dtype=torch.int16, device=device)
            unsplit(residual, self.options.rounding)
            return {**state, RESIDUAL: residual, TIES: _no_ties(device)}
        main = self.place.zeros(MAIN, size, device)
        main.put(parameter.reshape(-1))
        return {**state, MAIN: main}

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> None:
        """Update one parameter by itself, with the gradient that it has."""
        self._run([_Job(group, [parameter], window) for window in self._windows([parameter])])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        self.settle()
        jobs: list[_Job] = []
        for group in self.param_groups:
            group["step"] += 1
            held = [p for p in group["params"] if self.gradient_of(p) is not None and local_part(p).numel()]
            jobs += [_Job(group, held, window) for window in self._windows(held)]
        self._run(jobs)

    def settle(self) -> None:
        """Wait for copies to the host that the last step left under way, and free their sources."""
        if self._transfers is not None:
            self._transfers.close()

    @torch.no_grad()
    def main_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the float32 value of a parameter, in its shape; not to be changed."""
        self.settle()
        own, state = local_part(parameter), self.state_of(parameter)
        if MAIN in state:
            return state[MAIN].whole().view(own.shape)
        if RESIDUAL not in state:
            return own
        result = torch.empty(own.shape, dtype=torch.float32, device=own.device)
        for piece in self._pieces(own):
            _range(result, piece).copy_(self._joined(parameter, state, piece, state[_SECOND].whole()))
        return result

    @torch.no_grad()
    def take_main_parameter(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Set the float32 value of a parameter, and the parameter with it."""
        self.settle()
        own, state, value = local_part(parameter), self.state_of(parameter), local_part(value)
        if RESIDUAL not in state:
            own.copy_(value.view(own.shape))
            if MAIN in state:
                state[MAIN].put(value.reshape(-1))
            return
        state[TIES] = _no_ties(own.device)
        second = state[_SECOND].whole().clone() if self._signs else None
        for piece in self._pieces(own):
            part = _range(value, piece).to(own.device, torch.float32).contiguous()
            self._split(own, state, piece, part, None if second is None else second[piece.start : piece.stop])
        if second is not None:
            state[_SECOND].put(second)

    @torch.no_grad()
    def forget_main_parameter(self, parameter: torch.Tensor) -> None:
        """Start again from the parameter, which was overwritten from outside."""
        self.settle()
        state = self.state[parameter]
        if MAIN in state:
            state[MAIN].put(local_part(parameter).reshape(-1))
        elif RESIDUAL in state:
            unsplit(state[RESIDUAL], self.options.rounding)
            state[TIES] = _no_ties(state[RESIDUAL].device)
            if self._signs:
                state[_SECOND].put(state[_SECOND].whole().abs())

    def adopt_main_parameter(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Take over a float32 copy where it is what will be kept."""
        kept = self.place.adopted(MAIN, local_part(value).view(-1)) if self.options.master != SPLIT else None
        if kept is not None:
            self.state[parameter] = {MAIN: kept}

    def describe(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """Return both moments; what the sign of the second tells of main parameters is left out."""
        self.settle()
        found = {name: state[name].whole().view(parameter.shape) for name in MOMENTS}
        if self._signs and RESIDUAL in state:
            found[_SECOND] = found[_SECOND].abs()
        return found

    @torch.no_grad()
    def take(self, parameter: torch.Tensor, described: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the moments of a parameter."""
        self.settle()
        state = self.state_of(parameter)
        for name in MOMENTS:
            if name not in described:
                continue
            value = local_part(described[name]).reshape(-1)
            if name == _SECOND and self._signs and RESIDUAL in state:
                up = state[name].whole().view(torch.int32) < 0
                value = value.to(up.device, torch.float32, copy=True)
                _set_signs(value, up)
            state[name].put(value)

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state of a parameter, made where there is none."""
        state = self.state[parameter]
        if _FIRST not in state:
            # A copy that was taken over stays.
            self.state[parameter] = state = {**self._new_beside(parameter, state), **state}
        return state

    def _new_beside(self, parameter: torch.Tensor, held: Mapping[str, Any]) -> dict[str, Any]:
        own = self.local_part(parameter)
        if MAIN not in held:
            return self.new_state(own)
        part = self.part_of(parameter)
        return {name: self.place.zeros(name, own.numel(), own.device, part) for name in MOMENTS}

    @property
    def _signs(self) -> bool:
        options = self.options
        return options.master == SPLIT and options.ties == SIGN and options.rounding != HALF_UP

    def _windows(self, parameters: Sequence[torch.Tensor]) -> list[Window]:
        elements = sum(local_part(p).numel() for group in self.param_groups for p in group["params"])
        sizes = [local_part(parameter).numel() for parameter in parameters]
        return windows(sizes, self.place.window(elements), self.place.align, self._leads(parameters))

    def _leads(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Return how many elements lie before each parameter's first, up to where it could be cut."""
        if not self.place.along_parameter:
            return [0] * len(parameters)
        return [self.part_of(parameter).start % self.place.align for parameter in parameters]

    def _pieces(self, own: torch.Tensor) -> Iterator[Piece]:
        for window in windows([own.numel()], self.place.block, self.place.align):
            yield from window

    def _run(self, jobs: Sequence[_Job]) -> None:
        hosted = [self._host_parts(job) for job in jobs]
        if not any(hosted):
            for job in jobs:
                self._update_window(job, {})
            return
        if self._transfers is None:
            self._transfers = self.place.transfers(local_part(jobs[0].parameters[0]).device)
        transfers = self._transfers
        transfers.open([sum(part.numel() for part in parts.values()) for parts in hosted])
        ahead = transfers.fetch(list(hosted[0].values()))
        for number, job in enumerate(jobs):
            staged = ahead
            if number + 1 < len(jobs):
                ahead = transfers.fetch(list(hosted[number + 1].values()))
            transfers.wait(staged)
            self._update_window(job, dict(zip(hosted[number], staged.device)))
            transfers.store(staged)
        if not self.place.deferred:
            transfers.close()

    def _host_parts(self, job: _Job) -> dict[tuple[int, str], torch.Tensor]:
        """Return the ranges of a window that lie on the host, by the number of the parameter and the name."""
        found = {}
        for piece in job.window:
            for name, kept in self.state_of(job.parameters[piece.index]).items():
                if isinstance(kept, Plain) and kept.on_host:
                    found[piece.index, name] = kept.tensor[piece.start : piece.stop]
        return found

    def _update_window(self, job: _Job, staged: Mapping[tuple[int, str], torch.Tensor]) -> None:
        starts = {piece.index: piece.start for piece in job.window}
        size = sum(piece.size for piece in job.window)
        leads = self._leads(job.parameters)
        for part in cut(job.window, self.place.batch(size), self.place.align, leads):
            batch = _Batch()
            for piece in part:
                start = piece.start - starts[piece.index]
                found = {
                    name: whole[start : start + piece.size]
                    for (index, name), whole in staged.items()
                    if index == piece.index
                }
                self._add(batch, job.parameters[piece.index], piece, found, job.group["step"])
            self._call(job.group, batch)
            for action in batch.afterwards:
                action()

    def _add(
        self,
        batch: _Batch,
        parameter: torch.Tensor,
        piece: Piece,
        staged: Mapping[str, torch.Tensor],
        step: int,
    ) -> None:
        """Add a range of a parameter to what AdamW is called with."""
        own, state = local_part(parameter), self.state_of(parameter)
        gradient = self.gradient_of(parameter)
        assert gradient is not None
        batch.gradients.append(
            self.float32_gradient(local_part(gradient).reshape(-1)[piece.start : piece.stop])
        )
        moments = [self._fetched(batch, state[name], piece, staged.get(name), step) for name in MOMENTS]
        if RESIDUAL in state:
            main = self._joined(parameter, state, piece, moments[1], offset=piece.start)
            if self._signs:
                moments[1].view(torch.int32).bitwise_and_(_NO_SIGN)
            batch.afterwards.insert(0, lambda: self._split(own, state, piece, main, moments[1]))
        elif MAIN in state:
            main = self._fetched(batch, state[MAIN], piece, staged.get(MAIN), step)
            batch.afterwards.append(lambda: _copy(_range(own, piece), main))
        else:
            main = _range(own, piece)
        batch.mains.append(main)
        for moment, column in zip(moments, batch.moments):
            column.append(moment)

    def _fetched(
        self, batch: _Batch, kept: Kept, piece: Piece, staged: torch.Tensor | None, step: int
    ) -> torch.Tensor:
        """Return a range of kept numbers on the device, which AdamW changes."""
        if staged is not None:
            return staged
        values = kept.take(piece.start, piece.stop)
        batch.afterwards.append(lambda: kept.give(piece.start, piece.stop, values, step))
        return values

    def _call(self, group: Mapping[str, Any], batch: _Batch) -> None:
        if self._kernel is not None:
            self._kernel(batch.mains, batch.gradients, *batch.moments, step=group["step"], group=group)
            return
        before = float(group["step"] - 1)
        self._rule(
            batch.mains,
            batch.gradients,
            *batch.moments,
            [],
            [torch.tensor(before) for _ in batch.mains],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _joined(
        self,
        parameter: torch.Tensor,
        state: Mapping[str, Any],
        piece: Piece,
        second: torch.Tensor,
        offset: int = 0,
    ) -> torch.Tensor:
        """Return the main parameter of a range; ``second`` begins at the element ``offset``."""
        if self._signs:
            up = second[piece.start - offset : piece.stop - offset].view(torch.int32) < 0
        else:
            up = _within(state[TIES], piece)[0] - piece.start
        weight = _range(local_part(parameter), piece)
        return join(weight, state[RESIDUAL][piece.start : piece.stop], self.options.rounding, up)

    def _split(
        self,
        own: torch.Tensor,
        state: dict[str, Any],
        piece: Piece,
        main: torch.Tensor,
        second: torch.Tensor | None,
    ) -> None:
        """Split the main parameter of a range, and note its ties; ``second`` is that of the range."""
        residual = state[RESIDUAL][piece.start : piece.stop]
        up = split(main, _range(own, piece), residual, self.options.rounding)
        if up is None:
            return
        if self._signs:
            assert second is not None
            _set_signs(second, up)
        elif not self.place.platform.dry_run:
            # Shapes alone do not tell how many ties there are; on average it is one of 2^17 numbers.
            _, others = _within(state[TIES], piece)
            state[TIES] = torch.cat((others, up.nonzero().view(-1).add_(piece.start)))


def _range(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    return tensor.view(-1)[piece.start : piece.stop]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _no_ties(device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64, device=device)


def _within(ties: torch.Tensor, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ties of a range, and the others."""
    if not ties.numel():
        return ties, ties
    inside = (ties >= piece.start) & (ties < piece.stop)
    return ties[inside], ties[~inside]


def _set_signs(values: torch.Tensor, negative: torch.Tensor) -> None:
    """Set the sign bit of float32 numbers, zeros included."""
    values.view(torch.int32).bitwise_and_(_NO_SIGN).bitwise_or_(negative.to(torch.int32) << 31)
