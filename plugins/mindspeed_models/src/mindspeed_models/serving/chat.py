"""The loop of ``mindspeed-models chat``: reads a line, shows the answer while it grows."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_core.errors import LostPeerError, UserError, guess
from mindspeed_core.terminal.foreign_text import clean, emit
from mindspeed_models.data.conversation import USER, Message
from mindspeed_models.inference.requests import Generated, GenerationRequest, GenerationSettings
from mindspeed_models.serving.conversation import Conversation
from mindspeed_models.serving.prompts import Prompts

if TYPE_CHECKING:
    from mindspeed_models.inference.loaded import LoadedModel

HELP = (
    "/reset forgets the turns; /system TEXT sets the system message (alone: shows it); /save FILE writes the "
    "conversation; /exit or Ctrl-D ends. Ctrl-C interrupts an answer."
)
_COMMANDS = ("/reset", "/system", "/save", "/help", "/exit", "/quit")
_SEEDS = 31


class Chat:
    """One conversation with a model.

    Attributes:
        conversation: what was said.
    """

    def __init__(
        self,
        model: LoadedModel,
        prompts: Prompts,
        settings: GenerationSettings,
        *,
        system: str = "",
        seeded: bool = False,
    ) -> None:
        """Begin a conversation.

        Args:
            model: of the leader.
            prompts: turn messages into ids.
            settings: of the answers.
            system: the system message.
            seeded: keep the seed of the settings; otherwise each answer draws with a new one.
        """
        self._model = model
        self._prompts = prompts
        self._settings = settings
        self._seeded = seeded
        self._number = 0
        self.conversation = Conversation(system)

    def check(self) -> None:
        """Refuse a model without a template before the first line is typed.

        Raises:
            UserError: there is none, or it refuses the system message.
        """
        self._prompts.chat([*self.conversation.messages(), Message(USER, "a")])

    def run(self, read: Callable[[], str]) -> None:
        """Read and answer until the input ends or says so.

        Raises:
            LostPeerError: a rank of the model was lost.
        """
        while True:
            try:
                line = read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                emit("\n(Ctrl-D or /exit ends)")
                continue
            try:
                if line in ("/exit", "/quit"):
                    return
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self._answer(line)
            except LostPeerError:
                raise
            except UserError as error:
                emit(f"error: {error}", err=True)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/help":
            emit(HELP)
        elif name == "/reset":
            self.conversation.reset()
            emit("(the turns are forgotten)")
        elif name == "/system":
            if rest:
                self.conversation.system = rest
                emit("(the system message is set)")
            else:
                emit(self.conversation.system or "(there is none)")
        elif name == "/save":
            if not rest:
                raise UserError("/save: name a file")
            self.conversation.save(Path(rest).expanduser())
            emit(f"(written to {rest})")
        else:
            raise UserError(f"{name}: there is no such command{guess(name, _COMMANDS)}; see /help")

    def _answer(self, line: str) -> None:
        settings = self._settings
        self.conversation.ask(line)
        try:
            room = self._model.max_positions - (settings.max_new_tokens or 1)
            ids, dropped = self.conversation.fitted(self._prompts.chat, room)
        except UserError:
            self.conversation.turns.pop()
            raise
        if dropped:
            emit(
                f"({dropped // 2} oldest turns are left out: there are {self._model.max_positions} positions)"
            )
        if not settings.max_new_tokens:
            settings = replace(settings, max_new_tokens=self._model.max_positions - len(ids))
        if not self._seeded:
            settings = replace(settings, seed=secrets.randbits(_SEEDS))
        said: list[str] = []
        self._number += 1
        with _interruptible() as interrupted:

            def on_text(request_id: int, text: str) -> bool:
                if interrupted.is_set():
                    return False
                said.append(text)
                # A model may have learned escape sequences, which a terminal would obey.
                sys.stdout.write(clean(text, lines=True))
                sys.stdout.flush()
                return True

            try:
                request = GenerationRequest(ids, settings, self._number)
                result: Generated | None = self._model.generate_requests([request], on_text)[0]
            except UserError:
                self.conversation.turns.pop()
                raise
        text = "".join(said)
        if result is not None and not interrupted.is_set() and result.text.startswith(text):
            sys.stdout.write(clean(result.text[len(text) :], lines=True))
            text = result.text
        emit("")
        if interrupted.is_set():
            emit("(interrupted)")
        elif result is not None and result.finish_reason == "length":
            emit("(cut at the limit of tokens)")
        self.conversation.answered(text)


def reader(prompt: str) -> Callable[[], str]:
    """Return a function that reads a line: with a prompt and history on a terminal, plainly otherwise."""
    if not sys.stdin.isatty():

        def plain() -> str:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line

        return plain
    with contextlib.suppress(ImportError):
        # Its import alone gives `input` arrows and history.
        import readline  # noqa: F401
    return lambda: input(prompt)


@contextmanager
def in_foreground() -> Iterator[None]:
    """Let this process read the terminal where a launcher has started it in a process group of its own."""
    try:
        before = os.tcgetpgrp(0)
    except OSError:
        # It is no terminal, or not the one of this session.
        yield
        return
    ignored = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        os.tcsetpgrp(0, os.getpgrp())
        yield
    finally:
        with contextlib.suppress(OSError):
            os.tcsetpgrp(0, before)
        signal.signal(signal.SIGTTOU, ignored)


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Let the first Ctrl-C set an event, so that all ranks end the step together; a second one raises."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def on_signal(number: int, frame: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
