"""A model that generates and scores, in an open session."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import ArgumentError, LostPeerError, SessionError, UserError
from mindspeed_models.inference.engine import Engine
from mindspeed_models.inference.following import Commands, requests_of
from mindspeed_models.inference.opening import chat_template_in
from mindspeed_models.inference.prompts import Prompts, detokenizer
from mindspeed_models.inference.requests import (
    Generated,
    GenerationRequest,
    GenerationSettings,
    Scored,
    check_prompt,
)
from mindspeed_models.inference.run_sizes import drawable_tokens, positions
from mindspeed_models.inference.scoring import check_pairs
from mindspeed_train.interface import NullTokenizer

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_models.inference.adapters import LoadedAdapters
    from mindspeed_models.inference.engine import Following

BATCH_SIZE = 8
OnText = Callable[[int, str], bool]
"""Gets a request's id and its new text; False cancels that request."""


class LoadedModel:
    """A model in an open session of mode ``inference``, or that of a training between two steps.

    Every rank of the layout has one. Calls are made on all ranks alike, or by the leader while all others
    `follow`; either way all ranks compute what rank 0 was asked.

    Attributes:
        tokenizer: of the host: ``tokenize(text)``, ``detokenize(ids)``, ``eod``.
        max_positions: tokens of prompt and answer together at most.
        vocab_size: tokens that may be drawn; padded rows are not among them.
        chat_template: Jinja text of the tokenizer's chat template; empty for none.
        end_tokens: that end an answer where a request names no others.
        adapters: names of the adapters that requests may name.
        leader: this rank is the one that asks while others follow.
        run: the run whose model it is.
    """

    def __init__(
        self,
        run: Run,
        ends: Sequence[int],
        *,
        adapters: LoadedAdapters | None = None,
        prefill_chunk: int = 0,
        batch_size: int = BATCH_SIZE,
        chat_template: str | None = None,
        tokenizer: Any = None,
        vocab_size: int | None = None,
    ) -> None:
        """Take a run whose model is in evaluation mode; `load` and `generating` do so.

        Args:
            run: the run.
            ends: tokens that end an answer.
            adapters: those that requests may name.
            prefill_chunk: tokens of a prompt that are computed at once; 0 for all.
            batch_size: requests of a batch at most.
            chat_template: name or file of a chat template; that of the tokenizer by default.
            tokenizer: with ``tokenize`` and ``detokenize``; that of the run by default, or plain ids.
            vocab_size: tokens that may be drawn; those of the run's arguments by default.
        """
        if prefill_chunk < 0:
            raise ArgumentError("--prefill-chunk", prefill_chunk, "is no number of tokens", "use 0 for all")
        if batch_size < 1:
            raise ArgumentError("--batch-size", batch_size, "is no number of requests", "use 1 or more")
        args = run.args
        path = getattr(args, "tokenizer_model", None)
        self.run = run
        self.vocab_size = drawable_tokens(run) if vocab_size is None else vocab_size
        self.tokenizer: Any = tokenizer or run.tokenizer or NullTokenizer(self.vocab_size)
        self.max_positions = positions(run)
        self.chat_template = chat_template_in(Path(path)) if path else ""
        self.end_tokens = tuple(each for each in ends if each < self.vocab_size)
        self.adapters: tuple[str, ...] = () if adapters is None else adapters.names
        self._loaded_adapters = adapters
        self._closing = ExitStack()
        self._prompts = Prompts(self.tokenizer, path, getattr(args, "tokenizer_type", None), chat_template)
        self._engine: Engine | None = Engine(
            run,
            vocab_size=self.vocab_size,
            detokenize=detokenizer(self.tokenizer),
            ends=self.end_tokens,
            batch_size=batch_size,
            prefill_chunk=prefill_chunk,
            adapters=adapters,
        )
        self._commands = Commands()
        self.leader = self._commands.leads

    def own(self, closing: ExitStack) -> LoadedModel:
        """Take over what is to be closed with the model; return the model."""
        self._closing = closing.pop_all()
        return self

    def encode(self, prompt: Any) -> list[int]:
        """Return the ids of one prompt: text, messages, ids or a tensor."""
        return self._prompts.of(prompt)[0][0]

    def generate(
        self,
        input_ids: Any = None,
        *,
        do_sample: bool = False,
        top_k: int = 50,
        top_p: float = 1.0,
        temperature: float = 1.0,
        num_beams: int = 1,
        max_length: int = 128,
        max_new_tokens: int = 0,
        min_new_tokens: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
        bos_token_id: int | None = None,
        pad_token_id: int | None = None,
        tokenizer: Any = None,
        length_penalty: float = 1.0,
        repetition_penalty: float = 1.0,
        num_return_sequences: int = 1,
        recompute: bool = False,
        detokenize: bool = True,
        include_input: bool = False,
        stream: bool = False,
        return_output_log_probs: bool = False,
        logprobs: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        adapter: str | None = None,
    ) -> Any:
        """Continue one or several prompts.

        Args:
            input_ids: text, ids, a tensor ``[s]`` or ``[b, s]``, messages, or a list of such.
            do_sample: see `GenerationSettings`, as all others that are not named here.
            top_k: likewise.
            top_p: likewise.
            temperature: likewise.
            num_beams: likewise.
            max_length: likewise.
            max_new_tokens: likewise.
            min_new_tokens: likewise.
            eos_token_id: tokens that end an answer; the model's own by default.
            bos_token_id: likewise.
            pad_token_id: likewise.
            tokenizer: of texts; that of the model by default.
            length_penalty: likewise.
            repetition_penalty: likewise.
            num_return_sequences: likewise.
            recompute: accepted; keys and values are cached, which gives the same.
            detokenize: return text; otherwise lists of ids.
            include_input: begin results with the prompt.
            stream: return a generator of the growing text; of several prompts, of their growing texts.
            return_output_log_probs: return results and the log-probabilities of their tokens.
            logprobs: return results and, for each token, the so many likeliest ones with theirs.
            stop: texts that end an answer.
            seed: likewise.
            adapter: name of the adapter.

        Returns:
            What is asked for: a list for a list of prompts, and for several hypotheses of one.

        Raises:
            UserError: one sentence with the flag or keyword, its value and the way out.
        """
        prompts, alone = self._prompts.of([] if input_ids is None else input_ids, tokenizer)
        wants = 0 if return_output_log_probs and logprobs is None else logprobs
        ends = (eos_token_id,) if isinstance(eos_token_id, int) else eos_token_id
        settings = GenerationSettings(
            do_sample=do_sample,
            top_k=top_k,
            top_p=top_p,
            temperature=temperature,
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            min_new_tokens=min_new_tokens,
            eos_token_ids=None if ends is None else tuple(ends),
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            seed=seed,
            repetition_penalty=repetition_penalty,
            length_penalty=length_penalty,
            num_return_sequences=num_return_sequences,
            logprobs=wants,
        )
        requests = [
            GenerationRequest(prompt, settings, number, adapter) for number, prompt in enumerate(prompts)
        ]
        if stream:
            self._checked(requests, stream=True)
            return self._growing(requests, alone)
        found = self.generate_hypotheses(requests)
        text = detokenizer(tokenizer) if tokenizer is not None else detokenizer(self.tokenizer)

        def shown(request: GenerationRequest, one: Generated) -> Any:
            ids = [*request.prompt, *one.tokens] if include_input else one.tokens
            if not detokenize:
                return ids
            if tokenizer is not None:
                return text(ids)
            return text(request.prompt) + one.text if include_input else one.text

        def sorted_out(pick: Callable[[GenerationRequest, Generated], Any]) -> Any:
            per_prompt = [[pick(request, one) for one in each] for request, each in zip(requests, found)]
            flat = [each[0] if len(each) == 1 else each for each in per_prompt]
            return flat[0] if alone else flat

        results = sorted_out(shown)
        if logprobs is not None:
            return results, sorted_out(lambda request, one: one.top_logprobs or one.logprobs)
        if return_output_log_probs:
            return results, sorted_out(lambda request, one: one.logprobs)
        return results

    def generate_requests(
        self, requests: Sequence[GenerationRequest], on_text: OnText | None = None
    ) -> list[Generated]:
        """Continue requests, each with its own settings; return the best answer of each, in order.

        Args:
            requests: at most a batch of them are computed together.
            on_text: is called on rank 0 with a request's id and its new text, and cancels with False.

        Raises:
            UserError: one sentence with the flag, its value and the way out.
        """
        if on_text is None:
            return [each[0] for each in self.generate_hypotheses(requests)]
        following = self._follow_texts(requests)
        cancelled: set[int] = set()
        try:
            events = next(following)
            while True:
                for request_id, new in events:
                    if request_id not in cancelled and self.leader and on_text(request_id, new) is False:
                        cancelled.add(request_id)
                events = following.send(cancelled)
        except StopIteration as end:
            results: list[Generated] = [each[0] for each in end.value]
        finally:
            following.close()
        for request, result in zip(requests, results):
            # Beams know their text at the end only.
            if request.settings.num_beams > 1 and self.leader and result.text:
                on_text(request.request_id, result.text)
        return results

    def generate_hypotheses(self, requests: Sequence[GenerationRequest]) -> list[list[Generated]]:
        """Continue requests; return ``num_return_sequences`` answers of each, the best first."""
        asked = self._shared("generate", requests)
        return self._own_engine().generate(asked) if asked else []

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        """Return log-likelihoods of continuations (second) given contexts (first), in order.

        Raises:
            UserError: one is empty, too long, or has ids that the model lacks.
        """
        check_pairs(pairs, vocab_size=self.vocab_size, max_positions=self.max_positions)
        command = self._commands.share({"do": "score", "pairs": [[*map(list, pair)] for pair in pairs]})
        return self._scored(command)

    def follow(self) -> None:
        """Compute what the leader is asked until it closes; for every other rank.

        Raises:
            LostPeerError: a rank of the model ended; one that dies raises what its closed connection does.
        """
        if self.leader:
            raise SessionError("LoadedModel.follow: this rank leads; the others follow it")
        while self._engine is not None:
            command = self._commands.share(None)
            try:
                self._obey(command)
            except LostPeerError:
                # The leader may wait for nobody, and never say anything more.
                raise
            except UserError:
                # The leader raises the same, and goes on.
                continue

    def close(self) -> None:
        """End the session; followers return from `follow`."""
        if self._engine is None:
            return
        if self.leader:
            self._commands.share({"do": "close"})
        elif self._commands.share(None)["do"] != "close":
            raise SessionError("LoadedModel.close: rank 0 goes on; close it first")
        self._end()

    def __enter__(self) -> LoadedModel:
        """Return the model."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the model; after a lost rank or an error in the middle of a batch, without the others."""
        lost = isinstance(error, LostPeerError)
        if self._engine is not None and (lost or self._engine.midway) and not self._commands.alone:
            # They wait for this one, and end when it does.
            self._engine = None
            return
        self.close()

    def _end(self) -> None:
        self._engine = None
        self._commands.close()
        self._closing.close()

    def _obey(self, command: dict[str, Any]) -> None:
        if command["do"] == "close":
            self._end()
        elif command["do"] == "score":
            self._scored(command)
        elif command["do"] == "follow":
            following = self._own_engine().follow(requests_of(command))
            for _ in following:
                pass
        else:
            self._own_engine().generate(requests_of(command))

    def _scored(self, command: dict[str, Any]) -> list[Scored]:
        pairs = [(context, continuation) for context, continuation in command["pairs"]]
        return self._own_engine().score(pairs) if pairs else []

    def _own_engine(self) -> Engine:
        if self._engine is None:
            raise SessionError("LoadedModel: it is closed; load the model again")
        return self._engine

    def _shared(self, what: str, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """Check requests and return rank 0's on every rank."""
        checked = self._checked(requests, stream=False)
        return requests_of(self._commands.share({"do": what, "requests": [asdict(each) for each in checked]}))

    def _checked(self, requests: Sequence[GenerationRequest], *, stream: bool) -> list[GenerationRequest]:
        self._own_engine()
        found = []
        for request in requests:
            settings, prompt = request.settings, list(request.prompt)
            settings.validate(vocab_size=self.vocab_size, max_positions=self.max_positions, stream=stream)
            if settings.bos_token_id is not None and prompt[:1] != [settings.bos_token_id]:
                prompt.insert(0, settings.bos_token_id)
            check_prompt(prompt, settings, vocab_size=self.vocab_size, max_positions=self.max_positions)
            if self._loaded_adapters is not None:
                self._loaded_adapters.check(request.adapter)
            elif request.adapter:
                raise UserError(
                    f"adapter {request.adapter!r}: none is loaded; name its folder with --lora-load"
                )
            found.append(replace(request, prompt=prompt))
        return found

    def _follow_texts(self, requests: Sequence[GenerationRequest]) -> Following:
        asked = self._shared("follow", requests)
        return self._own_engine().follow(asked)

    def _growing(self, requests: Sequence[GenerationRequest], alone: bool) -> Generator[Any, None, None]:
        """Yield the text, or the texts, each time that there is more."""
        following = self._follow_texts(requests)
        texts = [""] * len(requests)
        try:
            for events in following:
                for number, new in events:
                    texts[number] += new
                if events:
                    yield texts[0] if alone else list(texts)
        finally:
            following.close()
