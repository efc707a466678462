"""A whole model of real size on one rank of a world of any size, on tensors without values.

A session on the platform ``fake-npu`` runs every stage up to the data; then one step's micro-batches run
forward and backward through megatron-core's schedule, and what a test asks of them is recorded.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest import mock

from mindspeed_core.activation import activate
from mindspeed_megatron.fake.npu import FakeNpuPlatform
from mindspeed_megatron.fake.npu_shapes import SHAPES
from mindspeed_megatron.instruments.communication import Total, count_communication
from mindspeed_megatron.instruments.memory import TensorBytes
from mindspeed_testing.npu.fake import FakeNpu, count_runs

if TYPE_CHECKING:
    from mindspeed_core.registry import Registry
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session


@dataclass(frozen=True)
class StepRecord:
    """The record of one step on this rank.

    Attributes:
        operations: operations of the device, forward and backward, by name with overload.
        communication: calls and bytes by operation and process group.
        without_gradient: names of parameters that require grad and got none.
        peak_bytes: most bytes of tensors alive beyond those that were alive before the step.
    """

    operations: Mapping[str, int]
    communication: Mapping[tuple[str, str], Total]
    without_gradient: tuple[str, ...]
    peak_bytes: int

    def count(self, operation: str) -> int:
        """Count the runs of an operation of the device: ``npu_swiglu``."""
        return count_runs(self.operations, operation)

    def calls(self, operation: str, group: str = "") -> int:
        """Count communication calls of a kind: ``all_gather_into_tensor``."""
        return sum(
            total.calls
            for (name, where), total in self.communication.items()
            if name == operation and group in where
        )


@dataclass(frozen=True)
class ShapeOnlyTraining:
    """A model that is set up, with optimizer and schedule, on the fake device."""

    session: Session
    run: Run
    npu: FakeNpu

    def step(self) -> StepRecord:
        """Run the micro-batches of one step forward and backward, and reduce the gradients."""
        from mindspeed_train.interface import batch_at, run_schedule

        run = self.run
        batch = batch_at(run.args, run.consumed_train_samples)
        parameters = {name: p for c in run.model for name, p in c.named_parameters() if p.requires_grad}
        reached: set[str] = set()
        before = Counter(self.npu.operations)
        with ExitStack() as stack:
            for name, parameter in parameters.items():
                hook = parameter.register_post_accumulate_grad_hook(lambda _, name=name: reached.add(name))
                stack.callback(hook.remove)
            log = stack.enter_context(count_communication())
            tracker = stack.enter_context(TensorBytes())
            assert run.data is not None
            assert run.data.train is not None
            run_schedule(run, run.data.train, batch.microbatches, forward_only=False)
        return StepRecord(
            operations=self.npu.operations - before,
            communication=log.table(),
            without_gradient=tuple(sorted(set(parameters) - reached)),
            peak_bytes=tracker.peak,
        )


@contextmanager
def shape_only_training(
    flags: Sequence[str],
    *,
    world_size: int = 1,
    rank: int = 0,
    registry: Registry | None = None,
    extra_plugins: Sequence[object] = (),
) -> Iterator[ShapeOnlyTraining]:
    """Set a training up as one rank of a world on the fake NPU.

    Args:
        flags: the command line of the standalone host; data flags are not needed.
        world_size: ranks of the world; there is only this process.
        rank: which of them this process is.
        registry: what is installed; read from the environment by default.
        extra_plugins: further objects with hook implementations, outermost.
    """
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    npu = FakeNpu(SHAPES)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, place))
        stack.enter_context(mock.patch.object(FakeNpuPlatform, "answering_mode", return_value=npu))
        session = activate(
            flags, host="standalone", platform="fake-npu", registry=registry, extra_plugins=extra_plugins
        )
        stack.callback(session.close)
        from mindspeed_train import interface

        stack.callback(interface.teardown, session)
        yield ShapeOnlyTraining(session, interface.setup(session), npu)
