"""Communication of a rank: calls and bytes per operation and process group.

The functions of ``torch.distributed`` are wrapped where they are defined and wherever megatron-core and
plugins hold them by name; a dispatcher-level mode would miss calls from autograd's threads and coalesced
ones. A wait is seen on the handle that the call returned, or on the one that a coalesced batch shares.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_core.feature import Patch
from mindspeed_core.runtime.patches import PatchLedger
from mindspeed_megatron.backend_contracts.contract import REDUCTIONS, BackendContract
from mindspeed_megatron.backend_contracts.rendezvous import MESSAGES
from mindspeed_megatron.backend_contracts.tensor_facts import CollectiveCall, TensorFacts, is_gloo_group
from mindspeed_megatron.instruments.code_places import running_code
from mindspeed_megatron.instruments.communicated_bytes import COLLECTIVES as COLLECTIVES
from mindspeed_megatron.instruments.communicated_bytes import MEASURES, OBJECTS, SAME_OPERATION, sizes, whole
from mindspeed_megatron.instruments.communication_log import (
    Call,
    CommunicationListener,
    CommunicationLog,
    GroupRecord,
    Progress,
)
from mindspeed_megatron.instruments.communication_log import Total as Total
from mindspeed_megatron.instruments.work_counter import computes, flops_of


@contextmanager
def count_communication(
    computation: bool = False,
    objects: bool = False,
    contracts: Sequence[BackendContract] = (),
    listener: CommunicationListener | None = None,
) -> Iterator[CommunicationLog]:
    """Record every communication of this process inside the context.

    A call inside another recorded call is not counted again. Collectives of compiled graphs
    (``torch.distributed._functional_collectives``) do not pass through these functions and are not seen.

    Args:
        computation: also count operators and floating-point operations, which tells what lay between a launch
            and its wait; costs some microseconds per operator, and lets compiled functions run eagerly.
        objects: record a collective of Python objects as one call without bytes, rather than the calls that
            carry the pickled objects.
        contracts: refuse what these backends refuse, before it is called, in every group that is not one of
            gloo by its description.
        listener: hears of every call and wait.

    Raises:
        BackendRefusal: in the call that breaks a rule.
    """
    recorder = _Recorder(CommunicationLog(), _Computation() if computation else None, contracts, listener)
    wrappers: dict[str, Callable[..., Any]] = {
        name: functools.partial(recorder.counting, SAME_OPERATION.get(name, name))
        for name in (*MEASURES, *SAME_OPERATION, *(OBJECTS if objects else ()))
    }
    wrappers |= {
        "_coalescing_manager": recorder.coalescing,
        "batch_isend_irecv": recorder.batching,
        "new_group": recorder.grouping,
    }
    targets = {f"torch.distributed.distributed_c10d:{name}": new for name, new in wrappers.items()}
    targets |= dict.fromkeys(_own_waits(), recorder.waiting)
    ledger = PatchLedger()
    ledger.apply(
        [
            Patch(
                target=target,
                new=wrapper,
                reason="counts calls and bytes",
                kind="wrap",
                owner="communication log",
                required=False,
            )
            for target, wrapper in targets.items()
        ]
    )
    with ExitStack() as stack:
        stack.callback(ledger.revert)
        if recorder.computation is not None:
            stack.enter_context(recorder.computation)
        yield recorder.log


def _own_waits() -> Iterator[str]:
    """Yield ``wait`` of ``torch.distributed.Work`` and of each class of torch that has one of its own.

    The work of a world without peers is such a class.
    """
    classes = [dist.Work]
    for one in classes:
        classes += one.__subclasses__()
        if "wait" in vars(one) and one.__module__.startswith("torch."):
            yield f"{one.__module__}:{one.__qualname__}.wait"


class _Computation(TorchDispatchMode):
    """Counts operators that compute, and their floating-point operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if computes(func):
            self.operators += 1
            self.flops += flops_of(func, args, kwargs, result)
        return result


class _Recorder:
    """The wrappers of one log."""

    def __init__(
        self,
        log: CommunicationLog,
        computation: _Computation | None,
        contracts: Sequence[BackendContract] = (),
        listener: CommunicationListener | None = None,
    ) -> None:
        self.log = log
        self.computation = computation
        self._contracts = tuple(contracts)
        self._listener = listener
        self._events = self._batches = 0
        self._depth = threading.local()
        self._groups: weakref.WeakKeyDictionary[Any, tuple[str, tuple[int, ...], int, str]]
        self._groups = weakref.WeakKeyDictionary()
        self._unfinished: weakref.WeakKeyDictionary[Any, list[Call]] = weakref.WeakKeyDictionary()
        self._communicators: set[tuple[str, int | None]] = set()

    def now(self) -> Progress:
        counted = self.computation
        if counted is None:
            return Progress(time.perf_counter())
        return Progress(time.perf_counter(), counted.operators, counted.flops)

    def counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)
        argument, sent = MEASURES.get(name, ("", whole))

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.log._paused or getattr(self._depth, "inside", False):
                return original(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            label, ranks, me, group_name = self._facts(given.get("group"))
            tensors = given.get(argument or "tensor")
            of_tensors = sum(sizes(tensors))
            n = of_tensors if argument else 0
            asynchronous = bool(given.get("async_op", False)) or name in ("isend", "irecv")
            if self._contracts:
                self._check(name, label, ranks, given)
            call = Call(
                name,
                label,
                ranks,
                n,
                sent(n, len(ranks), me, given),
                asynchronous,
                self.now(),
                dtype=_dtype(tensors),
                tensor_bytes=of_tensors,
                peer=_peer(given, ranks),
                group_name=group_name,
                launch_event=self._event(),
            )
            self.log.calls.append(call)
            if self._listener is not None:
                self._listener.call_made(call)
            if not (name in MESSAGES and getattr(self._depth, "batching", False)):
                self._create(call)
            self._depth.inside = True
            try:
                with nullcontext() if asynchronous else self._waiting_for(call):
                    result = original(*args, **kwargs)
            finally:
                self._depth.inside = False
            if not asynchronous:
                call.waited, call.wait_event = self.now(), self._event()
            elif isinstance(work := getattr(result, "work", result), dist.Work):
                # A dry run's transfers hold the work that is waited for.
                self._unfinished[work] = [call]
            return result

        return counted

    @contextmanager
    def _waiting_for(self, call: Call) -> Iterator[None]:
        if self._listener is None:
            yield
            return
        self._listener.wait_started(call)
        try:
            yield
        finally:
            self._listener.wait_stopped(call)

    def _event(self) -> int:
        self._events += 1
        return self._events

    def _create(self, *calls: Call) -> None:
        """Note which call is the first of its communicator."""
        for call in calls:
            apart = len(call.ranks) == 1 or is_gloo_group(call.group)
            if not apart and call.communicator not in self._communicators:
                self._communicators.add(call.communicator)
                call.creates = True

    @contextmanager
    def _batch_under_way(self) -> Iterator[None]:
        """Leave communicators to the whole batch: only behind it is known that its messages are of one."""
        before = getattr(self._depth, "batching", False)
        self._depth.batching = True
        try:
            yield
        finally:
            self._depth.batching = before

    def _check(self, name: str, label: str, ranks: Sequence[int], given: Mapping[str, Any]) -> None:
        """Hold a call against the contracts of the backends that would serve it."""
        if is_gloo_group(label) or len(ranks) == 1:
            return
        call = CollectiveCall(
            name,
            label,
            len(ranks),
            tuple(_tensor_facts(given)),
            _reduction(given) if "op" in given or name in REDUCTIONS else "",
            # Given as a list, an array or a tensor; an empty one means equal parts.
            {key: tuple(map(int, given[key])) for key in _SPLITS if given.get(key) is not None},
            from_any=name in ("recv", "irecv")
            and given.get("src") is None
            and given.get("group_src") is None,
        )
        for contract in self._contracts:
            broken = contract.broken_rule(call)
            if broken is not None:
                place = next(iter(running_code(_BETWEEN, 1)), "")
                contract.check(call, str(place))

    def _facts(self, group: Any) -> tuple[str, tuple[int, ...], int, str]:
        """Return label, ranks, own position and name of a group; large groups take long to list."""
        given: Any = group if group is not None else dist.group.WORLD
        facts = self._groups.get(given)
        if facts is None:
            ranks = tuple(dist.get_process_group_ranks(given))
            me = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else -1
            facts = self._groups[given] = (_label(group, ranks), ranks, me, str(given.group_name))
        return facts

    def grouping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def new_group(*args: Any, **kwargs: Any) -> Any:
            group = original(*args, **kwargs)
            if not self.log._paused:
                given = kwargs.get("ranks", args[0] if args else None)
                ranks = tuple(range(dist.get_world_size()) if given is None else sorted(given))
                member = group is not None and group != dist.GroupMember.NON_GROUP_MEMBER
                described = kwargs.get("group_desc") or (args[5] if len(args) > 5 else None) or ""
                label = _described(str(described), ranks)
                self.log.groups.append(GroupRecord(label, ranks, str(group.group_name) if member else ""))
            return group

        return new_group

    def coalescing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        @contextmanager
        def coalesced(*args: Any, **kwargs: Any) -> Iterator[Any]:
            first = len(self.log.calls)
            with ExitStack() as waiting:
                with self._batch_under_way(), original(*args, **kwargs) as manager:
                    yield manager
                    # What is not asynchronous is waited for as the batch ends.
                    if self.log.calls[first:]:
                        waiting.enter_context(self._waiting_for(self.log.calls[first]))
            # The works exist only now, and each of them finishes all calls of the batch.
            batch = self.log.calls[first:]
            self._batches += 1
            ended = None if manager.works else self._event()
            for call in batch:
                call.asynchronous = bool(manager.works)
                call.waited = None if manager.works else self.now()
                call.wait_event, call.batch = ended, self._batches
            self._create(*batch)
            for work in manager.works:
                self._unfinished[work] = batch

        return coalesced

    def batching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def batch_isend_irecv(*args: Any, **kwargs: Any) -> Any:
            first = len(self.log.calls)
            with self._batch_under_way():
                works = original(*args, **kwargs)
            # Where the backend coalesces, the manager has numbered the batch.
            batch = [call for call in self.log.calls[first:] if call.batch is None]
            self._batches += bool(batch)
            for call in batch:
                call.batch = self._batches
            self._create(*batch)
            return works

        return batch_isend_irecv

    def waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            here, finished = self.now(), self._unfinished.pop(work, ())
            event = self._event() if finished else None
            for call in finished:
                call.waited, call.wait_event = here, event
            with self._waiting_for(finished[0]) if finished else nullcontext():
                return original(work, *args, **kwargs)

        return wait


def _tensor_facts(given: Mapping[str, Any]) -> Iterator[TensorFacts]:
    for argument, value in given.items():
        listed = value if isinstance(value, list) else [value]
        for tensor in listed:
            if isinstance(tensor, torch.Tensor):
                yield TensorFacts.of(argument, tensor)


def _reduction(given: Mapping[str, Any]) -> str:
    op = given.get("op", dist.ReduceOp.SUM)
    # A ReduceOp wraps a RedOpType; either prints as "<RedOpType.SUM: 0>" or "ReduceOp.SUM".
    return str(getattr(op, "op", op)).rpartition(".")[2].partition(":")[0].strip(">")


def _label(group: Any, ranks: Sequence[int]) -> str:
    return _described(str(getattr(group, "group_desc", "")) if group is not None else "default_pg", ranks)


def _described(description: str, ranks: Sequence[int]) -> str:
    if description in ("", "undefined"):
        return "ranks " + ",".join(str(rank) for rank in ranks)
    return description


def _dtype(tensors: Any) -> str:
    listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors or []
    return str(listed[0].dtype).removeprefix("torch.") if listed else ""


def _peer(given: Mapping[str, Any], ranks: Sequence[int]) -> int | None:
    """Return the global rank that a call names, as a global rank or by its place in the group."""
    for name in ("dst", "src"):
        if given.get(name) is not None:
            return int(given[name])
        place = given.get(f"group_{name}")
        if place is not None:
            return ranks[int(place)]
    return None


_SPLITS = ("input_split_sizes", "output_split_sizes")
_BETWEEN = (
    str(Path(torch.__file__).parent),
    str(Path(__file__)),
    contextlib.__file__,
    "<",
)
"""Code between a call and its check."""
