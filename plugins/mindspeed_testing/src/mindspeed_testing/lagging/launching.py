"""The streams that threads launch on, autograd's threads among them."""

from __future__ import annotations

import threading

import torch

from mindspeed_testing.lagging.streams import LaggingStream


class Launching:
    """For each thread the stream that it launches on."""

    def __init__(self, main: LaggingStream) -> None:
        """Let every thread launch on ``main``, the default stream."""
        self._main = main
        self._local = threading.local()
        self._of_nodes: dict[int, LaggingStream] = {}

    def current(self) -> LaggingStream:
        """Return the stream that this thread launches on."""
        chosen = self._entered()
        if chosen:
            return chosen[-1]
        if self._of_nodes:
            # Autograd runs a node on the stream of its forward pass, and orders it by itself.
            node = torch._C._current_autograd_node()
            stream = None if node is None else self._of_nodes.get(node._sequence_nr())
            if stream is not None:
                stream.join(self._main.known)
                self._local.node_stream = stream
                return stream
            before = getattr(self._local, "node_stream", None)
            if before is not None:
                self._local.node_stream = None
                self._main.join(before.known)
        return self._main

    def enter(self, stream: LaggingStream) -> None:
        """Let this thread launch on a stream, until `leave`."""
        self._entered().append(stream)

    def leave(self) -> None:
        """Let this thread launch where it did before."""
        self._entered().pop()

    def choose(self, stream: LaggingStream) -> None:
        """Let this thread launch on a stream from now on."""
        entered = self._entered()
        if entered:
            entered[-1] = stream
        elif stream is not self._main:
            entered.append(stream)

    def note_node(self, stream: LaggingStream) -> None:
        """Note that the operation which ran last was one of a stream, for its node's backward pass."""
        # What runs without gradients makes no node: the last one is another operation's, or that of a
        # function which chose a stream inside.
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._of_nodes[torch._C._autograd._get_sequence_nr() - 1] = stream

    def clear(self) -> None:
        """Forget the streams of nodes."""
        self._of_nodes.clear()

    def _entered(self) -> list[LaggingStream]:
        entered: list[LaggingStream] | None = getattr(self._local, "entered", None)
        if entered is None:
            entered = self._local.entered = []
        return entered
