"""Collectives and messages of a lagging device: the one place through which all of them go.

Every method of a process group is a `Call`. The backend works on copies and starts at once, so that nothing
waits that would not wait without this module. Outputs read as NaN until the work was waited for, inputs are
compared with what they were, and the wait orders the stream that waits and no other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed_core.feature import Patch
from mindspeed_testing.lagging.device import LaggingDevice
from mindspeed_testing.lagging.findings import Finding, Frames, calling_frames
from mindspeed_testing.lagging.streams import LaggingStream
from mindspeed_testing.lagging.values import poison

_IN, _OUT, _BOTH, _ROOTED = "in", "out", "both", "rooted"
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "_allgather_base": (_OUT, _IN),
    "all_gather_single": (_OUT, _IN),
    "all_gather_single_coalesced": (_OUT, _IN),
    "allgather": (_OUT, _IN),
    "allgather_coalesced": (_OUT, _IN),
    "allgather_into_tensor_coalesced": (_OUT, _IN),
    "allreduce": (_BOTH,),
    "allreduce_coalesced": (_BOTH,),
    "all_to_all_single": (_OUT, _IN),
    "alltoall": (_OUT, _IN),
    "alltoall_base": (_OUT, _IN),
    "broadcast": (_ROOTED,),
    "gather": (_OUT, _IN),
    "recv": (_OUT,),
    "recv_anysource": (_OUT,),
    "reduce": (_BOTH,),
    "_reduce_scatter_base": (_OUT, _IN),
    "reduce_scatter": (_OUT, _IN),
    "reduce_scatter_single": (_OUT, _IN),
    "reduce_scatter_single_coalesced": (_OUT, _IN),
    "reduce_scatter_tensor_coalesced": (_OUT, _IN),
    "scatter": (_OUT, _IN),
    "send": (_IN,),
    "barrier": (),
}
_MESSAGES = frozenset({"send", "recv", "recv_anysource"})


@dataclass(frozen=True)
class Call:
    """A call of a process group.

    Attributes:
        operation: name of the group's method: ``allreduce``, ``send``.
        group: the process group.
        inputs: tensors that are read.
        outputs: tensors that are written.
        arguments: all arguments of the method.
        options: keyword arguments.
    """

    operation: str
    group: Any
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


Rule = Callable[[Call], None]
"""Looks at every call before it is made, and raises what the backend would refuse."""


class Communication:
    """Runs the calls of all process groups of a session.

    Attributes:
        rules: asked before every call.
        calls: how many there were.
    """

    def __init__(self, device: LaggingDevice, rules: Sequence[Rule] = ()) -> None:
        """Start without calls."""
        self.device, self.rules, self.calls = device, list(rules), 0
        self._streams: dict[Any, LaggingStream] = {}

    def run(self, method: Callable[..., Any], operation: str, group: Any, args: Any, kwargs: Any) -> Any:
        """Make a call: start it on copies, and return what waits for it."""
        kinds = _ARGUMENTS[operation]
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        for kind, argument in zip(kinds, args):
            kind = _of_root(kind, group, args)
            if kind in (_IN, _BOTH):
                inputs += _tensors(argument)
            if kind in (_OUT, _BOTH):
                outputs += _tensors(argument)
        call = Call(operation, group, inputs, outputs, args, kwargs)
        for rule in self.rules:
            rule(call)
        self.calls += 1
        if not self.device.running or any(
            tensor.layout is not torch.strided for tensor in (*inputs, *outputs)
        ):
            return method(group, *args, **kwargs)
        return self._launch(method, call)

    def _launch(self, method: Callable[..., Any], call: Call) -> LateWork:
        device = self.device
        stream = self._stream(call)
        # The backend's stream begins behind what was launched here so far.
        stream.join(device.current().known)
        count = stream.launch()
        name = f"{call.operation} of group {_name(call.group)}"
        early = device.touch(stream, count, name, call.inputs, call.outputs)
        with _disable_current_modes(), torch.no_grad():
            device.prepare(call.inputs, stream)
            copies: dict[Any, Tensor] = {}
            arguments = tuple(_copied(argument, copies) for argument in call.arguments)
            for tensor in call.inputs if early else ():
                if tensor.is_floating_point():
                    poison(copies[_identity(tensor)])
            work = _BackendWork(method(call.group, *arguments, **call.options))
            written = [(tensor, copies[_identity(tensor)]) for tensor in call.outputs]
            apart = [one for one in call.inputs if not any(_share(one, other) for other in call.outputs)]
            digests = [(tensor, _digest(tensor)) for tensor in apart]
            late = LateWork(device, stream, count, name, work, written, digests)
            for tensor, copy in written:
                device.hold_back(tensor, stream, count, copy, work)
        return late

    def _stream(self, call: Call) -> LaggingStream:
        key: Any = id(call.group)
        if call.operation in _MESSAGES:
            key = (key, "messages", call.operation == "send")
        if key not in self._streams:
            self._streams[key] = self.device.stream(f"communication of group {_name(call.group)}")
        return self._streams[key]


class _BackendWork:
    """The backend's part of a call, waited for once: gloo waits for a second message for ever."""

    def __init__(self, work: Any) -> None:
        self.work = self.made = work

    def wait(self, *timeout: Any) -> None:
        work, self.work = self.work, None
        if work is not None:
            work.wait(*timeout)

    def is_completed(self) -> bool:
        return self.work is None or bool(self.work.is_completed())


class LateWork:
    """A collective under way.

    Attributes:
        operation: for reports.
    """

    def __init__(
        self,
        device: LaggingDevice,
        stream: LaggingStream,
        count: int,
        operation: str,
        work: _BackendWork,
        written: Sequence[tuple[Tensor, Tensor]],
        digests: Sequence[tuple[Tensor, bytes]],
    ) -> None:
        """Wait for nothing yet.

        Args:
            device: of the session.
            stream: of the group.
            count: number of the work on it.
            operation: for reports.
            work: of the backend.
            written: outputs and the copies that the backend fills.
            digests: inputs and what they were.
        """
        self.operation = operation
        self._device, self._stream, self._count, self._work = device, stream, count, work
        self._written, self._digests = written, digests
        self._frames = calling_frames()
        self._dropped = weakref.finalize(self, _report_dropped, device, operation, self._frames)
        self._dropped.atexit = False
        self._ended = False

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream come after it."""
        self._end(timeout)
        current = self._device.current()
        current.join({self._stream.number: self._count})
        return True

    def _end(self, timeout: Any = None) -> None:
        self._dropped.detach()
        if self._ended:
            return
        self._ended = True
        with _disable_current_modes():
            self._work.wait(*(() if timeout is None else (timeout,)))
            for tensor, digest in self._digests:
                if _digest(tensor) != digest:
                    finding = f"an input of {self.operation} is not what it was when the call was made"
                    self._device.findings.add(
                        Finding("changed before the wait", finding, calling_frames(), self._frames)
                    )
        self._digests = ()

    def is_completed(self) -> bool:
        """Return whether the backend is done; the host knows it then."""
        if not self._work.is_completed():
            return False
        self._end()
        self._device.host.join({self._stream.number: self._count})
        return True

    def is_success(self) -> bool:
        """Return whether it ended well."""
        return self.is_completed()

    def synchronize(self) -> None:
        """Let the current stream come after it."""
        self.wait()

    def block_current_stream(self) -> None:
        """Let the current stream come after it."""
        self.wait()

    def exception(self) -> None:
        """Return that nothing failed: failures are raised by `wait`."""

    def _source_rank(self) -> int:
        rank: int = self._work.made._source_rank()
        return rank

    def get_future(self) -> Any:
        """Return a future that is done: whoever asks for it has waited."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self.result())
        return future

    def result(self) -> list[Tensor]:
        """Return the outputs."""
        return [tensor for tensor, _ in self._written]


def communication_patches(device: LaggingDevice) -> list[Patch]:
    """Return the patches that lead every process group's methods through one `Communication`.

    Args:
        device: of the session.
    """
    communication = Communication(device)
    device.communication = communication
    return [
        Patch(
            target=f"torch.distributed.distributed_c10d:ProcessGroup.{operation}",
            new=_through(communication, operation),
            kind="wrap",
            reason="collectives of a lagging device end when somebody waits for them",
            required=False,
        )
        for operation in _ARGUMENTS
    ]


def _through(communication: Communication, operation: str) -> Callable[..., Any]:
    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            return communication.run(method, operation, group, args, kwargs)

        return call

    return around


def _report_dropped(device: LaggingDevice, operation: str, frames: Frames) -> None:
    if device.running:
        finding = f"the work of {operation} went without anybody having waited for it"
        device.findings.add(Finding("dropped without a wait", finding, frames))


def _of_root(kind: str, group: Any, args: Sequence[Any]) -> str:
    """Return what a rank's tensor of a broadcast is: read where it comes from, written elsewhere."""
    if kind != _ROOTED:
        return kind
    root = getattr(args[1], "rootRank", None) if len(args) > 1 else None
    return _IN if root == group.rank() else _OUT


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in _tensors(one)]
    return []


def _identity(tensor: Tensor) -> Any:
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


def _copied(value: Any, copies: dict[Any, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = _identity(value)
        if key not in copies:
            copies[key] = value.detach().clone()
        return copies[key]
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(one, copies) for one in value)
    return value


def _share(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _digest(tensor: Tensor) -> bytes:
    # Of a copy: a storage that numpy has seen cannot be emptied any more.
    flat = tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else None
    return blake2b(b"" if flat is None else flat.numpy().tobytes(), digest_size=16).digest()


def _name(group: Any) -> str:
    return str(getattr(group, "group_desc", "") or getattr(group, "group_name", ""))
