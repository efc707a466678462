"""Answers that wait for the model: first come first served, several at a time.

The model belongs to one thread, which takes as many waiting answers as a batch holds. Each answer passes its
text to the client that waits for it; a client that has gone cancels its own and no other.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

from mindspeed_core.errors import LostPeerError, UserError
from mindspeed_models.inference.requests import Generated, GenerationRequest
from mindspeed_models.serving.settings import Limits, Refused

if TYPE_CHECKING:
    from mindspeed_models.inference.loaded import LoadedModel

Event = tuple[int, "str | Generated | Refused"]
"""Number of a choice, and new text, its end, or why there is none."""
_IDS = 1 << 31
_SIGNALS_AFTER = 0.2
"""Seconds of a wait for requests before Python looks for signals."""


@dataclass
class Choice:
    """One answer that a client waits for.

    Attributes:
        request: prompt and settings.
        index: its number among the answers to one request.
        events: receives text and the end.
        cancelled: set when nobody waits for it any more.
        begun: text has been passed on.
    """

    request: GenerationRequest
    index: int
    events: SimpleQueue[Event]
    cancelled: threading.Event
    begun: bool = field(default=False)

    def pass_on(self, event: str | Generated | Refused) -> None:
        """Pass an event to the client."""
        self.begun = True
        self.events.put((self.index, event))


def stable_id(prompt: Sequence[int], index: int) -> int:
    """Return an id that depends on prompt and number alone: the drawing of tokens depends on it."""
    text = f"{index}:{','.join(map(str, prompt))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % _IDS


class WaitingLine:
    """Answers in the order in which they were asked for."""

    def __init__(self, limits: Limits) -> None:
        """Begin with an empty line."""
        self._limits = limits
        self._line: deque[Choice] = deque()
        self._changed = threading.Condition()
        self._closed: str | None = None
        self.running = 0

    def __len__(self) -> int:
        """Return how many answers wait."""
        return len(self._line)

    @property
    def closed(self) -> str | None:
        """Return why nothing is taken any more; None while it is."""
        return self._closed

    def put(self, choices: Sequence[Choice]) -> None:
        """Append the answers of one request, all or none.

        Raises:
            Refused: too many wait, or the server ends.
        """
        with self._changed:
            if self._closed is not None:
                raise Refused(503, self._closed, code="closing")
            # Answers whose clients have gone count no more.
            self._line = deque(choice for choice in self._line if not choice.cancelled.is_set())
            if len(self._line) + len(choices) > self._limits.waiting:
                raise Refused(
                    429,
                    f"{len(self._line)} answers wait, --max-waiting is {self._limits.waiting}; try later",
                    code="queue_full",
                )
            self._line.extend(choices)
            self._changed.notify_all()

    def take(self) -> list[Choice]:
        """Wait for answers and return a batch of them; none when the line has been closed.

        Two answers that would draw alike, with one id, do not share a batch.
        """
        with self._changed:
            while not self._line and self._closed is None:
                # A signal that comes between two instructions does not wake a wait without an end.
                self._changed.wait(_SIGNALS_AFTER)
            batch: dict[int, Choice] = {}
            left: deque[Choice] = deque()
            while self._line and len(batch) < self._limits.batch:
                choice = self._line.popleft()
                if choice.cancelled.is_set():
                    continue
                if choice.request.request_id in batch:
                    left.append(choice)
                else:
                    batch[choice.request.request_id] = choice
            self._line.extendleft(reversed(left))
            self.running = len(batch)
            return list(batch.values()) if self._closed is None else self._refuse_all(batch.values())

    def close(self, reason: str) -> None:
        """Refuse everything that waits and whatever comes."""
        with self._changed:
            self._closed = self._closed or reason
            self._refuse_all(self._line)
            self._line.clear()
            self._changed.notify_all()

    def _refuse_all(self, choices: object) -> list[Choice]:
        assert self._closed is not None
        for choice in list(choices):  # type: ignore[call-overload]
            choice.pass_on(Refused(503, self._closed, code="closing"))
        return []


def answer_all(model: LoadedModel, line: WaitingLine, ended: Callable[[], bool]) -> None:
    """Answer until the line is closed; runs in the thread that owns the model.

    Args:
        model: the model.
        line: what waits.
        ended: whether the running answers shall stop, too.

    Raises:
        Exception: the model fails otherwise than by refusing a request; the line is closed first.
    """
    try:
        while line.closed is None:
            # Answers whose clients have gone are left out, so a batch may be empty.
            if batch := line.take():
                _answer(model, batch, ended)
            line.running = 0
    except BaseException as error:
        line.close(f"the server ends: {type(error).__name__}")
        raise


def _answer(model: LoadedModel, batch: Sequence[Choice], ended: Callable[[], bool]) -> None:
    by_id = {choice.request.request_id: choice for choice in batch}

    def on_text(request_id: int, text: str) -> bool:
        choice = by_id[request_id]
        if choice.cancelled.is_set() or ended():
            return False
        if text:
            choice.pass_on(text)
        return True

    try:
        results = model.generate_requests([choice.request for choice in batch], on_text)
    except LostPeerError as error:
        _fail(batch, Refused(500, f"a rank of the model was lost: {error}", code="model_failed"))
        raise
    except UserError as error:
        # What is asked for is too much together, or one of them cannot be answered: ask for less at a time.
        fresh = [choice for choice in batch if not choice.begun]
        _fail([choice for choice in batch if choice.begun], Refused(500, str(error), code="model_failed"))
        if len(fresh) > 1:
            half = len(fresh) // 2
            _answer(model, fresh[:half], ended)
            _answer(model, fresh[half:], ended)
        else:
            _fail(fresh, Refused(400, str(error), code="refused"))
        return
    except BaseException as error:
        _fail(batch, Refused(500, f"the model failed ({type(error).__name__})", code="model_failed"))
        raise
    for choice, result in zip(batch, results, strict=True):
        if ended() and not choice.cancelled.is_set():
            # Cut short: the client must not take it for a whole answer.
            choice.pass_on(Refused(503, "the server ends", code="closing"))
        else:
            choice.pass_on(result)


def _fail(batch: Sequence[Choice], reason: Refused) -> None:
    for choice in batch:
        choice.pass_on(reason)


def with_id(request: GenerationRequest, index: int) -> GenerationRequest:
    """Return the request under the id of its prompt and number."""
    return replace(request, request_id=stable_id(request.prompt, index))
