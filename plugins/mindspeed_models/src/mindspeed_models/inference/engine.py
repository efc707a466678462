"""Requests dealt out over data-parallel ranks and put into batches, and their results in order.

All ranks call the same methods with the same requests. Where ranks share experts, or texts are followed while
they grow, every data-parallel rank computes all requests instead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from mindspeed_core.errors import UserError
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_models.inference import scoring
from mindspeed_models.inference.beams import search
from mindspeed_models.inference.decoding import Events, Row, decode, text_of
from mindspeed_models.inference.passes import Passes
from mindspeed_models.inference.requests import Generated, GenerationRequest, Scored

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_models.inference.adapters import LoadedAdapters

T = TypeVar("T")
Detokenize = Callable[[Sequence[int]], str]
Following = Generator[Events, "set[int] | None", list[list[Generated]]]


class Engine:
    """Generation and scoring with the model of a run.

    Attributes:
        passes: the model.
        batch_size: requests of a batch at most.
        prefill_chunk: tokens of prompts that are computed at once; 0 for all.
        midway: a batch was left where other ranks cannot know of it.
    """

    def __init__(
        self,
        run: Run,
        *,
        vocab_size: int,
        detokenize: Detokenize,
        ends: Sequence[int],
        batch_size: int,
        prefill_chunk: int,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        """Take the model of a run.

        Args:
            run: in evaluation mode.
            vocab_size: tokens that may be drawn.
            detokenize: from ids to text.
            ends: the model's own end tokens.
            batch_size: requests of a batch at most.
            prefill_chunk: tokens of prompts that are computed at once; 0 for all.
            adapters: those that requests may name.
        """
        self.passes = Passes(run, vocab_size)
        self.batch_size, self.prefill_chunk = batch_size, prefill_chunk
        self.midway = False
        self._run, self._detokenize, self._ends, self._adapters = run, detokenize, tuple(ends), adapters
        experts = getattr(run.pg, "ep", None)
        self._shares = experts is not None and experts.size() > 1
        self._dp = run.pg.dp
        if not self.passes.takes_masks and prefill_chunk and run.config.window_size is None:
            raise UserError(
                f"--prefill-chunk {prefill_chunk}: the model's attention takes no masks, which later chunks "
                "need; leave it out"
            )

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generated]]:
        """Continue requests; return the hypotheses of each, in order of the requests. Collective."""
        batches = self._batches(requests)

        def compute(batch: list[int]) -> list[tuple[int, list[Generated]]]:
            return _exhaust(self._batch(requests, batch, follow_text=False))

        return self._dealt(batches, compute)

    def follow(self, requests: Sequence[GenerationRequest]) -> Following:
        """Continue requests and yield new texts as they come; rank 0 is sent what to cancel. Collective."""
        found: dict[int, list[Generated]] = {}
        for batch in self._batches(requests):
            found.update((yield from self._batch(requests, batch, follow_text=True)))
        return [found[place] for place in range(len(requests))]

    def score(self, pairs: Sequence[scoring.Pair]) -> list[Scored]:
        """Score continuations, in order. Collective."""

        def compute(batch: list[int]) -> list[tuple[int, Scored]]:
            self.midway = True
            found = scoring.score(self.passes, [pairs[place] for place in batch])
            self.midway = False
            return list(zip(batch, found))

        return self._dealt(scoring.batches(pairs, self.passes.vocab_size), compute)

    def _batches(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        """Return the places of requests in batches: of one adapter, and of like lengths."""

        def kind(place: int) -> tuple[bool, str, int]:
            request = requests[place]
            # Where attention takes no masks, texts of a batch have one length.
            length = 0 if self.passes.takes_masks else len(request.prompt)
            # No name is the first adapter, the empty one none.
            return (request.adapter is not None, request.adapter or "", length)

        order = sorted(range(len(requests)), key=lambda place: (*kind(place), len(requests[place].prompt)))
        found: list[list[int]] = []
        for place in order:
            beams = requests[place].settings.num_beams > 1
            before = None if not found else found[-1]
            joins = (
                before is not None
                and not beams
                and requests[before[0]].settings.num_beams == 1
                and kind(before[0]) == kind(place)
                and len(before) < self.batch_size
            )
            if joins and before is not None:
                before.append(place)
            else:
                found.append([place])
        return found

    def _batch(
        self, requests: Sequence[GenerationRequest], batch: Sequence[int], *, follow_text: bool
    ) -> Generator[Events, set[int] | None, list[tuple[int, list[Generated]]]]:
        """Continue one batch."""
        rows = [self._row(place, requests[place]) for place in batch]
        self.midway = True
        try:
            found = yield from self._rows(rows, follow_text=follow_text)
        except UserError:
            # All ranks of the model refuse alike.
            self.midway = False
            raise
        self.midway = False
        return found

    def _rows(
        self, rows: Sequence[Row], *, follow_text: bool
    ) -> Generator[Events, set[int] | None, list[tuple[int, list[Generated]]]]:
        """Continue the requests of a batch."""
        if self._adapters is not None:
            self._adapters.use(rows[0].request.adapter)
        if rows[0].request.settings.num_beams > 1:
            found = search(self.passes, rows[0], chunk=self.prefill_chunk, detokenize=self._detokenize)
            return [(rows[0].place, found)]
        decoding = decode(self.passes, rows, chunk=self.prefill_chunk, follow_text=follow_text)
        if not follow_text:
            for _ in decoding:
                pass
        else:
            yield from self._followed(decoding, [row.request.request_id for row in rows])
        return [(row.place, [row.result()]) for row in rows]

    def _followed(
        self, decoding: Generator[Events, set[int] | None, None], ids: Sequence[int]
    ) -> Generator[Events, set[int] | None, None]:
        """Pass texts on, and tell every rank what rank 0 cancels; a reader that leaves cancels all."""
        cancelled: set[int] = set()
        gone = False
        try:
            events = next(decoding)
            while True:
                try:
                    cancelled |= (yield events) or set()
                except BaseException:
                    # The other ranks are in the middle of the batch: they learn of it, and all end together.
                    gone = True
                    raise
                finally:
                    flags = [gone or each in cancelled for each in ids]
                    agreed = self._of_leader(flags)
                    if gone:
                        decoding.close()
                        self.midway = False
                if all(agreed):
                    self._end(decoding, ids)
                    return
                events = decoding.send({each for each, flag in zip(ids, agreed) if flag})
        except StopIteration:
            return

    @staticmethod
    def _end(decoding: Generator[Events, set[int] | None, None], ids: Sequence[int]) -> None:
        """Let a batch end without a further pass."""
        try:
            decoding.send(set(ids))
        except StopIteration:
            return

    def _of_leader(self, flags: Sequence[bool]) -> list[bool]:
        """Return rank 0's flags on every rank."""
        if dist.get_world_size() == 1:
            return list(flags)
        values = torch.tensor(flags, dtype=torch.uint8, device=self.passes.device)
        dist.broadcast(values, src=0)
        return [bool(value) for value in values.tolist()]

    def _row(self, place: int, request: GenerationRequest) -> Row:
        settings = request.settings
        ends = self._ends if settings.eos_token_ids is None else settings.eos_token_ids
        limit = settings.new_tokens(len(request.prompt))
        return Row(place, request, frozenset(ends), limit, text_of(self._detokenize, request))

    def _dealt(
        self, batches: Sequence[list[int]], compute: Callable[[list[int]], list[tuple[int, T]]]
    ) -> list[T]:
        """Compute this rank's share of batches and gather all results, or raise what any rank found wrong."""
        shares = 1 if self._shares else self._dp.size()
        mine = batches[self._dp.rank() % shares :: shares] if shares > 1 else batches
        found: list[tuple[int, T]] = []
        wrong: str | None = None
        try:
            for batch in mine:
                found += compute(batch)
        except UserError as error:
            if shares == 1:
                raise
            wrong = str(error)
        if shares > 1:
            every: list[Any] = all_gather_values((found, wrong), self._dp)
            wrong = next((text for _, text in every if text is not None), None)
            if wrong is not None:
                raise UserError(wrong)
            found = [one for part, _ in every for one in part]
        return [value for _, value in sorted(found, key=lambda one: one[0])]


def _exhaust(batch: Generator[Events, set[int] | None, list[T]]) -> list[T]:
    """Run a generator to its end and return its result."""
    try:
        while True:
            next(batch)
    except StopIteration as end:
        result: list[T] = end.value
        return result
