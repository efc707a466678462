"""A loaded model as lm-eval asks one: log-likelihoods and generated texts, in batches, kept in a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mindspeed_core.errors import LostPeerError, UserError
from mindspeed_models.evaluation.answers import AnswerLog, digest
from mindspeed_models.inference.requests import GenerationRequest, GenerationSettings
from mindspeed_models.serving.prompts import Prompts
from mindspeed_models.serving.waiting import stable_id

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from mindspeed_models.evaluation.items import Item
    from mindspeed_models.inference.loaded import LoadedModel

T = TypeVar("T")
Asked = TypeVar("Asked", bound=tuple[Any, ...])
"""A question in a batch, behind its key."""
Pair = tuple[list[int], list[int]]
FAILED = float("nan")
"""Log-likelihood of a continuation that could not be scored."""


class LanguageModel(TemplateLM):
    """The model of the leader, with prompts encoded as it was trained.

    Attributes:
        truncated: keys of questions whose prompt was cut on its left.
        errors: messages of questions that got no answer, by key.
    """

    def __init__(
        self,
        model: LoadedModel,
        prompts: Prompts,
        log: AnswerLog,
        items: dict[str, list[Item]],
        *,
        batch_tokens: int,
        seed: int = 0,
        temperature: float = 0.0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            model: of the leader.
            prompts: turn text into ids.
            log: earlier answers.
            items: the questions of each of lm-eval's tasks, by its name.
            batch_tokens: tokens computed together at most.
            seed: of drawn answers.
            temperature: of several answers to one question; 0 takes the likeliest.
            say: takes a line about progress.
        """
        super().__init__()
        self._model = model
        self._prompts = prompts
        self._log = log
        self._items = items
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._temperature = temperature
        self._say = say
        self.truncated: set[str] = set()
        self.errors: dict[str, str] = {}

    @property
    def eot_token_id(self) -> int:
        """Return the token that ends documents."""
        return self._prompts.encoder.eod

    @property
    def prefix_token_id(self) -> int:
        """Return the token that stands for an empty context: the first of texts, or that which ends them."""
        return (self._prompts.encoder.before or [self.eot_token_id])[0]

    @property
    def max_length(self) -> int:
        """Return the positions of the model."""
        return self._model.max_positions

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
        """Return the ids of a text, begun as the tokenizer begins one unless that is turned off."""
        ids = self._prompts.text(string)
        before = self._prompts.encoder.before
        return ids[len(before) :] if add_special_tokens is False else ids

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihoods of continuations, and whether each is the likeliest one."""
        asked: list[tuple[str, Pair]] = []
        for request in requests:
            context, continuation = request.args
            item = self._item(request)
            if item is not None and item.last_token:
                pair = (
                    self.tok_encode(context),
                    self.tok_encode(continuation, add_special_tokens=False)[-1:],
                )
            elif context:
                pair = self._encode_pair(context, continuation)
            else:
                pair = ([self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False))
            asked.append((self._key(request), pair))
        return self._scored(asked)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **more: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihoods of encoded pairs."""
        return self._scored([("", (context, continuation)) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts, window by window."""
        results = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            pairs = [(self._key(request), make_disjoint_window(window)) for window in windows]
            results.append(sum(value for value, _ in self._scored(pairs)))
        return results

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return generated texts; of requests to one question each draws for itself."""
        asked: list[tuple[str, list[Any]]] = []
        waiting: dict[str, tuple[str, list[Any], GenerationRequest]] = {}
        copies: dict[str, int] = {}
        for request in requests:
            context, options = request.args
            key = self._key(request)
            copy = copies[key] = copies.get(key, -1) + 1
            settings = self._settings(options)
            # Room for the answer, and one token of the prompt at least.
            new = min(settings.max_new_tokens, self.max_length - 1)
            settings = replace(settings, max_new_tokens=new)
            ids = self._cut(key, self.tok_encode(context), self.max_length - new)
            question = ["generate", ids, list(settings.stop), new, settings.temperature, self._seed, copy]
            asked.append((key, question))
            if self._log.get(question) is None:
                # What is drawn depends on the prompt and the copy's number, not on its neighbours.
                found = GenerationRequest(ids, settings, stable_id(ids, copy))
                waiting.setdefault(digest(question), (key, question, found))
        longest = sorted(waiting.values(), key=lambda each: -len(each[2].prompt))
        done = len(asked) - len(longest)
        for batch in self._batches(
            longest, lambda each: len(each[2].prompt) + each[2].settings.max_new_tokens
        ):
            self._generate(batch)
            done += len(batch)
            self._progress("answers", done, len(asked))
        return [str(self._answer(key, question, "")) for key, question in asked]

    def _settings(self, options: dict[str, Any]) -> GenerationSettings:
        drawn = self._temperature > 0
        return GenerationSettings(
            do_sample=drawn,
            temperature=self._temperature if drawn else 1.0,
            top_k=0,
            max_new_tokens=options["max_gen_toks"],
            stop=tuple(options["until"]),
            seed=self._seed,
        )

    def _answered(
        self, batch: Sequence[Asked], ask: Callable[[Sequence[Asked]], Sequence[Any]]
    ) -> Iterator[tuple[Asked, Any]]:
        """Yield each entry with its answer; of a batch that is refused the halves are asked, down to one."""
        try:
            answers = ask(batch)
        except LostPeerError:
            raise
        except UserError as error:
            if len(batch) == 1:
                self.errors[batch[0][0]] = str(error)
                return
            half = len(batch) // 2
            yield from self._answered(batch[:half], ask)
            yield from self._answered(batch[half:], ask)
            return
        yield from zip(batch, answers, strict=True)

    def _generate(self, batch: Sequence[tuple[str, list[Any], GenerationRequest]]) -> None:
        def ask(part: Sequence[tuple[str, list[Any], GenerationRequest]]) -> Sequence[Any]:
            return self._model.generate_requests([request for _, _, request in part], None)

        for (_, question, request), answer in self._answered(batch, ask):
            text = answer.text
            for stop in request.settings.stop:
                text = text.split(stop)[0]
            self._log.put(question, text)

    def _scored(self, pairs: Sequence[tuple[str, Pair]]) -> list[tuple[float, bool]]:
        asked: list[tuple[str, list[Any]]] = []
        waiting: dict[str, tuple[str, list[Any]]] = {}
        for key, (context, continuation) in pairs:
            # The last token is scored and not read.
            room = self.max_length - len(continuation) + 1
            question = ["score", [], continuation]
            if room < 1 or not continuation:
                self.errors[key] = f"the continuation has {len(continuation)} tokens"
            else:
                question = ["score", self._cut(key, context, room), continuation]
                if self._log.get(question) is None:
                    waiting.setdefault(digest(question), (key, question))
            asked.append((key, question))
        # The longest come first: what does not fit fails at once.
        longest = sorted(waiting.values(), key=lambda each: -_length(each))
        done = len(asked) - len(longest)
        for batch in self._batches(longest, _length):
            self._score(batch)
            done += len(batch)
            self._progress("log-likelihoods", done, len(asked))
        results = [self._answer(key, question, (FAILED, False)) for key, question in asked]
        return [(float(value), bool(greedy)) for value, greedy in results]

    def _score(self, batch: Sequence[tuple[str, list[Any]]]) -> None:
        def ask(part: Sequence[tuple[str, list[Any]]]) -> Sequence[Any]:
            return self._model.score([(question[1], question[2]) for _, question in part])

        for (key, question), score in self._answered(batch, ask):
            if math.isfinite(score.logprob):
                self._log.put(question, [score.logprob, score.greedy])
            else:
                self.errors[key] = f"the log-likelihood is {score.logprob}"

    def _answer(self, key: str, question: list[Any], failed: Any) -> Any:
        """Return the answer to a question; one that failed is noted under each key that asked it."""
        found = self._log.get(question)
        if found is None:
            self.errors.setdefault(key, "the same question has failed")
            return failed
        return found

    def _cut(self, key: str, ids: list[int], room: int) -> list[int]:
        """Return the end of a prompt that fits; what begins every text is kept."""
        if len(ids) <= room:
            return ids
        self.truncated.add(key)
        before = self._prompts.encoder.before
        kept = before if ids[: len(before)] == before and room > len(before) else []
        return [*kept, *ids[len(ids) - (room - len(kept)) :]]

    def _batches(self, waiting: Sequence[T], length: Callable[[T], int]) -> Iterator[list[T]]:
        batch: list[T] = []
        for each in waiting:
            longest = max(map(length, [*batch, each]))
            if batch and longest * (len(batch) + 1) > self._batch_tokens:
                yield batch
                batch = []
            batch.append(each)
        if batch:
            yield batch

    def _progress(self, kind: str, done: int, all_: int) -> None:
        if self._say is not None:
            self._say(f"{kind}: {done} of {all_}")

    def _item(self, request: Instance) -> Item | None:
        items = self._items.get(request.task_name or "")
        return None if items is None else items[request.doc["at"]]

    def _key(self, request: Instance) -> str:
        item = self._item(request)
        return (
            f"{request.task_name}:{request.doc_id}" if item is None else question_key(request.task_name, item)
        )


def question_key(task: str | None, item: Item) -> str:
    """Return the name of a question among those of all tasks."""
    return f"{(task or '').partition(':')[0]}/{item.key}"


def _length(asked: tuple[str, list[Any]]) -> int:
    return len(asked[1][1]) + len(asked[1][2])
