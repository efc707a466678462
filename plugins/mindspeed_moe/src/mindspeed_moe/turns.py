"""A forward and a backward pass that take turns: while one waits for communication, the other computes.

Each pass runs as it would alone. Before it waits for rows that travel it lets the other one go on, up to
where that one would wait; so the exchanges of each run under the computation of the other. The forward pass
stays on the calling thread, the backward pass is called from another one, as autograd's own threads call it
on a device. Only one of them runs at a time, and who runs when depends on nothing but the two programs: ranks
with the same layers call their collectives in the same order.

Nothing in here knows layers or schedules: whoever has a forward and a backward pass that do not depend on one
another hands them to `Turns.run`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

T = TypeVar("T")


class Abandoned(Exception):
    """Ends a backward pass whose forward partner failed."""


class Turns:
    """The two passes that run at the moment, if any.

    Attributes:
        pairs: how many pairs of passes have run.
    """

    def __init__(self) -> None:
        """Begin without passes."""
        self.pairs = 0
        self._pair: _Pair | None = None

    def run(
        self,
        forward: Callable[[], T],
        backward: Callable[[], None],
        *,
        launching: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> T:
        """Run both passes, the backward pass first, and return the result of the forward pass.

        Args:
            forward: called on this thread; calls `in_forward` where it would wait.
            backward: called on a thread of its own; the nodes that it runs call `in_backward`.
            launching: returns the context in which that thread launches work, such as the current stream.

        Raises:
            Exception: what one of the two raised; the other one ends where it stands.
        """
        assert self._pair is None, "passes already take turns"
        pair = _Pair(backward, launching())
        self._pair = pair
        try:
            return pair.run(forward)
        finally:
            self._pair = None
            self.pairs += 1

    def in_forward(self) -> None:
        """Let the backward pass go on; nothing without one, and in a pass that backward computes again."""
        pair = self._pair
        if pair is not None and pair.is_forward():
            pair.leave_to_backward()

    def in_backward(self) -> None:
        """Let the forward pass go on; nothing without one."""
        pair = self._pair
        if pair is not None and not pair.is_forward():
            pair.leave_to_forward()


class _Pair:
    """Two threads of which one runs."""

    def __init__(self, backward: Callable[[], None], launching: AbstractContextManager[Any]) -> None:
        self._forward_thread = threading.get_ident()
        self._forward_may = threading.Semaphore(0)
        self._backward_may = threading.Semaphore(0)
        self._forward_ended = self._backward_ended = self._abandoned = False
        self._error: BaseException | None = None
        # A thread that a collective holds for ever must not hold the process.
        self._thread = threading.Thread(
            target=self._run_backward,
            args=(backward, _state_of_thread(), launching),
            name="backward",
            daemon=True,
        )

    def is_forward(self) -> bool:
        return threading.get_ident() == self._forward_thread

    def run(self, forward: Callable[[], T]) -> T:
        self._thread.start()
        try:
            self.leave_to_backward()
            result = forward()
        except BaseException:
            self._abandoned = True
            raise
        finally:
            self._forward_ended = True
            self._backward_may.release()
            self._thread.join()
        if self._error is not None:
            raise self._error
        return result

    def leave_to_backward(self) -> None:
        if self._backward_ended:
            return
        self._backward_may.release()
        self._forward_may.acquire()
        if self._error is not None:
            raise self._error

    def leave_to_forward(self) -> None:
        if not self._forward_ended:
            self._forward_may.release()
            self._backward_may.acquire()
        if self._abandoned:
            raise Abandoned("the forward pass that runs beside this backward pass failed")

    def _run_backward(
        self,
        backward: Callable[[], None],
        state: AbstractContextManager[None],
        launching: AbstractContextManager[Any],
    ) -> None:
        self._backward_may.acquire()
        try:
            if not self._abandoned:
                with state, launching:
                    backward()
        except BaseException as error:
            self._error = error
        finally:
            self._backward_ended = True
            self._forward_may.release()


def _state_of_thread() -> AbstractContextManager[None]:
    """Return a context that gives another thread what observes or answers the operations of this one."""
    modes = _get_current_dispatch_mode_stack()
    spreads = torch._C._is_multithreading_enabled()

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(spreads))
            for mode in modes:
                _push_mode(mode)
                stack.callback(_pop_mode, _key_of(mode))
            yield

    return entered()


def _key_of(mode: Any) -> Any:
    """Return the place in which torch keeps a mode apart from the others, None for most."""
    return getattr(mode, "_mode_key", None)
