"""A conversation in the terminal: what was said, shortened to what the model can read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_core.errors import UserError
from mindspeed_core.terminal.foreign_text import first_line
from mindspeed_models.data.conversation import ASSISTANT, SYSTEM, USER, Message


@dataclass
class Conversation:
    """Messages by turns.

    Attributes:
        system: the system message; empty for none.
        turns: questions and answers.
    """

    system: str = ""
    turns: list[Message] = field(default_factory=list)

    def messages(self, turns: Sequence[Message] | None = None) -> list[Message]:
        """Return the system message and the turns."""
        head = [Message(SYSTEM, self.system)] if self.system else []
        return [*head, *(self.turns if turns is None else turns)]

    def ask(self, text: str) -> None:
        """Add a question."""
        self.turns.append(Message(USER, text))

    def answered(self, text: str) -> None:
        """Add the answer; without one the question goes, too, since turns alternate."""
        if text.strip():
            self.turns.append(Message(ASSISTANT, text))
        else:
            self.turns.pop()

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns.clear()

    def fitted(self, encode: Callable[[Sequence[Message]], list[int]], room: int) -> tuple[list[int], int]:
        """Return the ids of the conversation, without oldest turns where it is too long, and how many went.

        Args:
            encode: turns messages into ids.
            room: most ids.

        Raises:
            UserError: the last question alone is too long.
        """
        for dropped in range(0, len(self.turns), 2):
            ids = encode(self.messages(self.turns[dropped:]))
            if len(ids) <= room:
                del self.turns[:dropped]
                return ids, dropped
        raise UserError(
            f"the message has {len(ids)} tokens with the system message, {room} are left for it; shorten "
            "it, or lower --max-new-tokens"
        )

    def save(self, path: Path) -> None:
        """Write the conversation as a line of JSON in the form of instruction data, to a new file.

        Raises:
            UserError: the file exists or cannot be written.
        """
        messages = [{"role": message.role, "content": message.content} for message in self.messages()]
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        except FileExistsError as error:
            raise UserError(f"/save {path}: exists; name a new file") from error
        except OSError as error:
            raise UserError(f"/save {path}: cannot be written ({first_line(error)})") from error
