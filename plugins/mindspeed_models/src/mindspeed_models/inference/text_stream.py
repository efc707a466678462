"""The text of an answer while it grows: whole characters only, and nothing that may begin a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "�"
"""What a tokenizer shows for bytes that are no whole character yet."""


class TextStream:
    """The text of one answer.

    Attributes:
        text: what was given out so far; the whole text once the answer has ended.
        stopped: a stop text was found, before which the text ends.
    """

    def __init__(self, detokenize: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        """Take the tokenizer's function from ids to text, and texts that end an answer."""
        self._detokenize = detokenize
        self._stop = tuple(stop)
        self.text = ""
        self.stopped = False

    def grow(self, tokens: Sequence[int], *, ended: bool = False) -> str:
        """Return the text that is new, given all tokens so far; with ``ended`` everything that is left."""
        if self.stopped:
            return ""
        whole = self._detokenize(tokens) if tokens else ""
        cut = _first(whole, self._stop)
        if cut is not None:
            self.stopped = True
            whole = whole[:cut]
        elif not ended:
            if whole.endswith(INCOMPLETE):
                whole = whole.rstrip(INCOMPLETE)
            whole = whole[: len(whole) - _held(whole, self._stop)]
        if not whole.startswith(self.text):
            # Some tokenizers change what came before when more follows; what was shown stays.
            return ""
        new = whole[len(self.text) :]
        self.text = whole
        return new


def _first(text: str, stop: Sequence[str]) -> int | None:
    """Return where the first stop text begins."""
    places = [place for place in (text.find(each) for each in stop) if place >= 0]
    return min(places) if places else None


def _held(text: str, stop: Sequence[str]) -> int:
    """Return how many last characters may be the beginning of a stop text."""
    most = 0
    for each in stop:
        for size in range(min(len(each) - 1, len(text)), most, -1):
            if text.endswith(each[:size]):
                most = size
                break
    return most
