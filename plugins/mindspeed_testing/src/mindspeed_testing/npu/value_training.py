"""Trainings on the value device, to be compared with those on the CPU.

A side is what `mindspeed_testing.training.train_side` makes of a command line, with every rank a process
of its own whose tensors live on a value device and whose groups communicate over gloo.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from mindspeed_core.feature import Scenario
from mindspeed_megatron.backend_contracts.hccl import HCCL
from mindspeed_megatron.devices.cann import AUTOLOAD
from mindspeed_testing.canonical import CanonicalState
from mindspeed_testing.fork_server import FURTHER_IMPORTS
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.npu.kernels.communicators import communicator_name
from mindspeed_testing.npu.soc import PRODUCTS
from mindspeed_testing.npu.stubs import SOC, check_stubbed
from mindspeed_testing.proof_files import flags_with_files
from mindspeed_testing.training import (
    RankRecord,
    SideRequest,
    SideResult,
    joined_ranks,
    train_rank,
    train_side,
)
from mindspeed_testing.worlds import run_world


@dataclass(frozen=True)
class ValueTraining:
    """A training on the value device.

    Attributes:
        side: losses, gradients and parameters, as `train_side` returns them.
        operations: per rank, how often each operation of the device and of torch.distributed ran.
    """

    side: SideResult
    operations: tuple[Mapping[str, int], ...]

    def count(self, operation: str) -> int:
        """Count the runs of an operation on all ranks: ``npu_swiglu``."""
        from mindspeed_testing.npu.fake import count_runs

        return sum(count_runs(rank, operation) for rank in self.operations)


def value_training(
    flags: Sequence[str] = (),
    *,
    world_size: int = 1,
    steps: int = 2,
    initial: CanonicalState | None = None,
    soc: str = "910B",
    files: Sequence[str] = (),
    declarations: Sequence[str] = (),
    extra_parameters: Sequence[str] = (),
    feature_state: bool = False,
    optimizer_state: bool = False,
    timeout: float = 300.0,
) -> ValueTraining:
    """Train the small GPT with ``flags`` added on value devices, one process a rank.

    Args:
        flags: appended to `mindspeed_testing.model_flags.SMALL_GPT`.
        world_size: ranks.
        steps: steps with forward, backward and update.
        initial: parameters to start from, as a side on the CPU has them.
        soc: the generation of the device, one of `mindspeed_testing.npu.kernels.contract.SOCS`.
        files: small files behind ``{files}`` in the flags.
        declarations: ``"module:Name"`` of features that are not installed.
        extra_parameters: patterns of parameters that ``initial`` may lack.
        feature_state: record what features keep, after the last step.
        optimizer_state: record the optimizer's state too.
        timeout: seconds for the whole world.

    Raises:
        WorldError: a rank failed; the message shows its error, of a kernel for instance.
        UserError: the process was not started with the stand-in libraries.
    """
    check_stubbed()
    with flags_with_files(flags, files) as filled:
        request = SideRequest(
            training_flags(filled, steps + 1),
            steps,
            initial,
            declarations=declarations,
            platform="npu",
            extra_parameters=extra_parameters,
            feature_state=feature_state,
            optimizer_state=optimizer_state,
            contracts=(HCCL[soc],) if soc in HCCL else (),
        )
        ranks = run_value_world(f"{__name__}:value_rank", world_size, request, soc, soc=soc, timeout=timeout)
    return joined_devices(ranks)


def run_value_world(
    function: Callable[..., Any] | str, world_size: int, *args: Any, soc: str = "910B", timeout: float = 300.0
) -> list[Any]:
    """Run a function on ranks that have imported torch_npu with the stand-ins; return what each returns.

    The ranks are forks of a process that has imported it once for all worlds of a generation.

    Args:
        function: a function of a module, or ``"module:name"``.
        world_size: ranks.
        args: of the function.
        soc: the generation of the device.
        timeout: seconds for the whole world.

    Raises:
        WorldError: a rank failed; the message shows its error, of a kernel for instance.
        UserError: the process was not started with the stand-in libraries.
    """
    check_stubbed()
    started = started_as(soc)
    imports = "torch_npu.contrib.transfer_to_npu,mindspeed_testing.npu.device"
    server = {**started, AUTOLOAD: "1", FURTHER_IMPORTS: imports}
    return run_world(function, world_size, *args, timeout=timeout, env=started, server=server)


def started_as(soc: str) -> dict[str, str]:
    """Return the environment in which a process starts torch_npu for a generation."""
    # Started as a 950, torch_npu copies by operators of CANN, which the stand-in runtime lacks.
    return {SOC: PRODUCTS["910B" if soc == "950" else soc][0]}


def joined_devices(ranks: Sequence[tuple[RankRecord, Mapping[str, int], Sequence[str]]]) -> ValueTraining:
    """Join what `value_rank` returned on every rank."""
    from mindspeed_testing.npu.device import COMPUTED, running_test

    for _, _, computed in ranks:
        for operation in computed:
            COMPUTED.setdefault(operation, running_test())
    side = joined_ranks([record for record, _, _ in ranks])
    return ValueTraining(side, tuple(count for _, count, _ in ranks))


def assert_equals_cpu(
    scenario: Scenario, *, soc: str = "910B", tolerance: float | None = None, timeout: float = 300.0
) -> ValueTraining:
    """Assert that a scenario's side on value devices equals its baseline on the CPU.

    Args:
        scenario: flags, baseline, world, steps, files and tolerance, as for ``mindspeed-features verify``.
        soc: the generation of the device.
        tolerance: in the place of the larger of the scenario's and the error of sums in another order.
        timeout: seconds for each side.

    Raises:
        AssertionError: with a report of the worst tensors, or of a rank that HCCL would never let go on.
        WorldError: a side cannot run, or HCCL refuses one of its calls.
    """
    extra = scenario.extra_parameters
    options: dict[str, Any] = {
        "feature_state": "feature state" in scenario.quantities,
        "optimizer_state": "optimizer state" in scenario.quantities,
        "files": scenario.files,
        "timeout": timeout,
    }
    with plain_fork_server():
        cpu = train_side(
            scenario.baseline,
            scenario.baseline_world_size or scenario.world_size,
            scenario.steps,
            platform="cpu",
            **options,
        )
    npu = value_training(
        scenario.flags,
        world_size=scenario.world_size,
        steps=scenario.steps,
        initial=cpu.initial,
        soc=soc,
        extra_parameters=extra,
        **options,
    )
    return assert_equal_sides(scenario, npu, cpu, soc=soc, tolerance=tolerance)


def assert_equal_sides(
    scenario: Scenario, npu: ValueTraining, cpu: SideResult, *, soc: str, tolerance: float | None = None
) -> ValueTraining:
    """Assert that a training on value devices equals one on the CPU; return it.

    Args:
        scenario: what is compared, and how exactly.
        npu: the training of its flags.
        cpu: the training of its baseline.
        soc: the generation of the device, for the message.
        tolerance: as for `assert_equals_cpu`.

    Raises:
        AssertionError: they differ, or HCCL would never let a rank go on.
    """
    from mindspeed_testing.compare_sides import compare_sides

    comparison, _ = compare_sides(
        npu.side,
        cpu,
        tolerance=max(scenario.tolerance, _rounding(scenario)) if tolerance is None else tolerance,
        quantities=scenario.quantities,
        demanded=scenario.compare,
        extra_losses=scenario.extra_losses,
        extra_parameters=scenario.extra_parameters,
    )
    if npu.side.blocked:
        raise AssertionError(f"{scenario.name} on Ascend {soc}: {npu.side.blocked[0]}")
    if not comparison.equal:
        raise AssertionError(f"{scenario.name} on Ascend {soc}: {comparison}")
    return npu


def _rounding(scenario: Scenario) -> float:
    """Return the relative error of sums that a device makes in another order than the CPU."""
    # A unit of bfloat16 is 4e-3 to 8e-3 of a number. Gradients differ by a part of it; of the numbers of an
    # updated parameter some fall to the other side.
    return 5e-3 if {"--bf16", "--fp16"} & {*scenario.flags} else 2e-5


def value_rank(request: SideRequest, soc: str) -> tuple[RankRecord, Counter[str], tuple[str, ...]]:
    """Train one rank of a side on a value device; return what it computed with, too."""
    from mindspeed_testing.npu.device import COMPUTED

    # Every process has a device of its own, the first.
    with mock.patch.dict(os.environ, LOCAL_RANK="0"), value_session(soc) as device:
        return train_rank(request), device.operations, tuple(COMPUTED)


@contextmanager
def value_session(soc: str | None = None) -> Iterator[Any]:
    """Let sessions on the platform ``npu`` run inside the context, their groups over gloo.

    Args:
        soc: the generation of the device; by default the one that the process was started with.

    Yields:
        The `mindspeed_testing.npu.device.ValueDevice`.
    """
    from mindspeed_core.platforms.platform import Availability
    from mindspeed_megatron.devices.npu import NpuPlatform
    from mindspeed_testing.npu.device import value_device

    check_stubbed()
    # It changes the same functions when a session is opened, and cannot be taken back.
    import torch_npu.contrib.transfer_to_npu  # noqa: F401
    from torch.distributed import distributed_c10d

    available = classmethod(lambda cls: Availability(True, "announced by the stand-in libraries"))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(NpuPlatform, "probe", available))
        made = _over_gloo(distributed_c10d._new_process_group_helper)
        stack.enter_context(mock.patch.object(distributed_c10d, "_new_process_group_helper", made))
        found = _backend_of(distributed_c10d.ProcessGroup._get_backend)
        stack.enter_context(mock.patch.object(distributed_c10d.ProcessGroup, "_get_backend", found))
        yield stack.enter_context(value_device(soc=soc))


def plain_fork_server() -> Any:
    """Return a context in which worlds fork from a process without torch_npu: the CPU is emulated there."""
    return mock.patch.dict(os.environ, {AUTOLOAD: "0"})


def _over_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stand in for what makes process groups: whatever the backend, they communicate over gloo."""
    from torch.distributed import Backend

    def make(
        size: int, rank: int, ranks: Any, backend: Any, store: Any, name: Any, *args: Any, **options: Any
    ) -> Any:
        options["backend_options"] = None
        return original(size, rank, ranks, Backend("gloo"), store, name, *args, **options)

    return make


class _DeviceBackend:
    """The part of a group's backend for NPUs that is called directly."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def get_hccl_comm_name(self, rank: int, init_comm: bool = True) -> str:
        """Return the communicator's name."""
        return communicator_name(self._group)

    def batch_isend_irecv(self, kinds: Sequence[str], tensors: Sequence[Any], peers: Sequence[int]) -> Any:
        """Start sends and receives between ranks of the group."""
        calls = {"isend": self._group.send, "irecv": self._group.recv}
        return _Works([calls[kind]([tensor], peer, 0) for kind, tensor, peer in zip(kinds, tensors, peers)])


class _Works:
    """Several pieces of communication as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, *timeout: Any) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait(*timeout)
        return True

    def is_completed(self) -> bool:
        """Return whether all have ended."""
        return all(work.is_completed() for work in self._works)


def _backend_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_backend(group: Any, device: Any) -> Any:
        return _DeviceBackend(group) if "npu" in str(device) else original(group, device)

    return get_backend
