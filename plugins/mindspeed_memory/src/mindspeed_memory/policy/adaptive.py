"""Adaptive recomputation: measure, plan, run the plan, and see that it holds its budget."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mindspeed_core.errors import UserError
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_memory.policy.costs import WHOLE, Measured, StagePlan, of_stage, plan_of_stage
from mindspeed_memory.policy.profile import Profile, rounds
from mindspeed_memory.policy.switched_layer import SwitchedLayer
from mindspeed_memory.recompute.layers import decoder_layers_of

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session
    from mindspeed_memory.saved.engine import SavedTensors
    from mindspeed_memory.saved.host_copy import HostCopies

_MIB = 2**20
_RESERVE = 2 * 2**30
"""Bytes of a device that are left to others where no budget was given."""
_CHECKS = 3
logger = logging.getLogger(__name__)


class AdaptiveRecompute:
    """The policy of one rank.

    Attributes:
        layers: of this rank.
        profile: their measurements.
        measured: those of all ranks; empty before they were exchanged.
        plan: of this rank's pipeline stage; None before there is one.
        budget: bytes.
        used: bytes of the last step that was followed, resident ones included.
    """

    def __init__(
        self,
        session: Session,
        chunks: Sequence[Any],
        owner: str,
        *,
        size: int,
        steps: int,
        share: float | None = None,
        engine: SavedTensors | None = None,
        copies: HostCopies | None = None,
        depth: int = 0,
    ) -> None:
        """Change the layers; all are computed again as a whole at first.

        Args:
            session: takes the changes back when it closes.
            chunks: the model chunks of this rank.
            owner: the feature.
            size: the budget in MiB; less than 1 for what the device has.
            steps: of measuring.
            share: the budget instead, between what full recomputation needs (0) and what none does (1).
            engine: puts saved tensors on the host, for layers that may swap.
            copies: what it puts there.
            depth: how many layers ahead of backward they come back.
        """
        self.plan: StagePlan | None = None
        self.used = 0
        self._session, self._owner, self._depth = session, owner, depth
        self.layers = [
            SwitchedLayer(session, placed, owner, self._run_layer, engine)
            for placed in decoder_layers_of(chunks)
        ]
        self.profile = Profile(self.layers, session.platform, copies)
        self._rounds = rounds(steps, swaps=engine is not None)
        self._step = 0
        self._checks = 0
        self._run: Run | None = None
        self._needed = (0, 0, 0)
        self.measured: list[Measured] = []
        self._given, self._share = size >= 1, share
        total = session.platform.total_memory()
        self.budget = size * _MIB if self._given else max(total - _RESERVE, total // 2)
        if copies is not None:
            self._spare_host_buffers()

    @contextmanager
    def step(self, run: Run) -> Iterator[None]:
        """Measure or plan beside the step of training that is done inside the context.

        Args:
            run: the run in progress.

        Raises:
            UserError: full recomputation needs more than the budget.
        """
        self._run = run
        measuring = self._step < len(self._rounds)
        # A dry run has no times: it stays with full recomputation, which is the least that fits.
        if (self._session.platform.dry_run and self._step > 1) or not (measuring or self._checks):
            yield
        elif measuring:
            with self.profile.step(run, self._rounds[self._step]):
                yield
            self._measured_step(run)
        else:
            with self.profile.step(run, None):
                yield
            self._check(run)

    def end_backward(self) -> None:
        """Note that the last backward pass of a step is done."""
        self.profile.end_backward()

    def _measured_step(self, run: Run) -> None:
        resident, peak, head = self.profile.needed
        if self._step == 0:
            self._needed = (resident, peak, head)
        # The optimizer's state exists from the first update on.
        self._needed = (max(resident, self._needed[0]), *self._needed[1:])
        self._step += 1
        if self._step == 2:
            everywhere = all_gather_values((sum(self._needed[:2]), self.budget))
            # Devices may differ in size; ranks that judged by budgets of their own would part ways here.
            self.budget = min(budget for _, budget in everywhere)
            if self._share is None:
                self._refuse([needed for needed, _ in everywhere])
        if self._step == len(self._rounds):
            measured = self.profile.result(run.pg.pp.rank(), self._needed)
            self.measured = all_gather_values(measured)
            if self._share is not None:
                self.budget = self._shared_budget(measured.stage, self._share)
            else:
                self._refuse([one.needed for one in self.measured])
            self._checks = _CHECKS
            self._apply(measured.stage, self.budget)

    def _check(self, run: Run) -> None:
        """Make a smaller plan where a step of this one took more than the budget on a rank of the stage."""
        self.used = sum(self.profile.needed[:2])
        stage = run.pg.pp.rank()
        everywhere = all_gather_values((stage, self.used - self.budget))
        over = max(beyond for where, beyond in everywhere if where == stage)
        self._checks -= 1
        if all(beyond <= 0 for _, beyond in everywhere):
            self._checks = 0
        elif over > 0:
            assert self.plan is not None
            within = of_stage(self.measured, stage).needed + self.plan.nbytes - over
            self._apply(stage, within if self._checks else 0)

    def _refuse(self, needed: Sequence[int]) -> None:
        if max(needed) <= self.budget:
            return
        mib = -(-max(needed) // _MIB)
        limit = f"--adaptive-recompute-device-size {self.budget // _MIB}" if self._given else "the device"
        raise UserError(
            f"{limit}: computing every layer again needs {mib} MiB on rank {needed.index(max(needed))} "
            f"already, of {self.budget // _MIB}; give {mib} or more, use smaller micro-batches, or shard more"
        )

    def _shared_budget(self, stage: int, share: float) -> int:
        """Return the bytes of this share of what the stage's fastest plan of all takes beyond the least."""
        measured = of_stage(self.measured, stage)
        most = plan_of_stage(measured, self._session.platform.total_memory(), depth=self._depth)
        return measured.needed + (0 if most is None else round(share * most.nbytes))

    def _apply(self, stage: int, budget: int) -> None:
        measured = of_stage(self.measured, stage)
        plan = plan_of_stage(measured, budget, depth=self._depth)
        if plan is None:
            forms = {key: (WHOLE,) * costs.layers for key, costs in measured.costs.items()}
            full = sum(costs.layers * costs.seconds[WHOLE] for costs in measured.costs.values())
            plan = StagePlan(forms, 0, full, full)
        self.plan = plan
        left = {key: list(forms) for key, forms in plan.forms.items()}
        for layer in self.layers:
            layer.form = left[layer.placed.chunk, layer.kind].pop(0)
        counted: dict[str, int] = defaultdict(int)
        for layer in self.layers:
            counted[layer.form] += 1
        logger.info(
            "pipeline stage %d computes again: %s; %d of %d MiB planned, %.3g of %.3g s a micro-batch",
            stage,
            ", ".join(f"{form} in {count} layers" for form, count in sorted(counted.items())),
            (measured.needed + plan.nbytes) // _MIB,
            self.budget // _MIB,
            plan.seconds,
            plan.seconds_of_full,
        )

    @property
    def planned_bytes(self) -> int:
        """Return the bytes that the plan may take, resident ones included; 0 before there is one."""
        if self.plan is None or self._run is None:
            return 0
        return of_stage(self.measured, self._run.pg.pp.rank()).needed + self.plan.nbytes

    def _run_layer(
        self, layer: SwitchedLayer, forward: Callable[[], Any], hidden_states: Tensor | None
    ) -> Any:
        if self._step >= len(self._rounds):
            return forward()
        now = self._rounds[self._step]
        first = self._run is not None and self._run.context.microbatch <= 0
        layer.form = now.form if first and self._usable(layer, now.form) else WHOLE
        return self.profile.run(layer, forward, hidden_states)

    def _usable(self, layer: SwitchedLayer, form: str) -> bool:
        return self.profile.is_measured(layer) and form in layer.forms

    def _spare_host_buffers(self) -> None:
        """Leave buffers of the host out of what is followed, also where the device is the host."""
        platform = self._session.platform
        original = platform.pinned_empty

        def pinned_empty(shape: Sequence[int], dtype: Any) -> Tensor:
            with self.profile.paused():
                return original(shape, dtype)

        self._session.instances.set(self._owner, platform, "pinned_empty", pinned_empty)
