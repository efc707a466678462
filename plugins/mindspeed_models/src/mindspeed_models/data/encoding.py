"""Conversations into ids and labels: which tokens are trained, and what is counted on the way.

The text is tokenized once, as training and generation see it. A token belongs to an answer where its last
character does: a token in which the end of a prompt and the beginning of an answer merged is trained, and
counted, since generation begins behind the prompt and will see other tokens. With ``segments`` there is no
such token: a prompt and its answer are tokenized apart.

`encoded` is the one way from a written conversation to ids; what generates and serves takes `prompt_ids`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mindspeed_models.data.conversation import BadRecord, Conversation, Message
from mindspeed_models.data.templates import Rendered, Template
from mindspeed_models.data.tokenizers import TextEncoder

IGNORED = -100
LAST, ALL_ANSWERS, EVERYTHING = "last", "assistant", "all"
TRAIN_ON = (LAST, ALL_ANSWERS, EVERYTHING)
TRUNCATE, DROP, FAIL = "truncate", "drop", "error"
OVERLONG = (DROP, TRUNCATE, FAIL)
WHOLE, SEGMENTS = "whole", "segments"
TOKENIZE = (WHOLE, SEGMENTS)


@dataclass(frozen=True)
class Sample:
    """A sample of instruction data.

    Attributes:
        ids: its tokens.
        labels: the same, or -100 where a token is not trained.
    """

    ids: list[int]
    labels: list[int]


@dataclass
class Counts:
    """Counts of samples by their fate.

    Attributes:
        samples: that were kept.
        tokens: of them.
        trained: tokens that are trained.
        answers: whose first token was looked at.
        merged: answers whose first token merged with the end of the prompt.
        overlong: samples longer than ``--seq-length``.
        cut: of them those whose answer was cut.
        dropped: of them those that were left out.
    """

    samples: int = 0
    tokens: int = 0
    trained: int = 0
    answers: int = 0
    merged: int = 0
    overlong: int = 0
    cut: int = 0
    dropped: int = 0

    def add(self, other: Counts) -> None:
        """Add those of another part."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Encoding:
    """The rule by which conversations become samples.

    Attributes:
        encoder: the tokenizer.
        template: writes a conversation.
        train_on: the last answer, all answers, or everything.
        append_eod: end a sample with the token that ends documents.
        seq_length: longest sample; None for any.
        overlong: what happens to longer ones.
        tokenize: the text as a whole, or each answer apart from what comes before it.
        counts: what happened so far.
    """

    encoder: TextEncoder
    template: Template
    train_on: str = LAST
    append_eod: bool = False
    seq_length: int | None = None
    overlong: str = DROP
    tokenize: str = WHOLE
    counts: Counts = field(default_factory=Counts)

    def samples(self, messages: Conversation) -> Iterator[Sample]:
        """Yield the samples of a conversation.

        Raises:
            BadRecord: it cannot be written, or is too long where that is an error.
        """
        for rendered in self.template.samples(messages):
            yield from self.fitted(self._encoded(messages, rendered))

    def fitted(self, sample: Sample) -> Iterator[Sample]:
        """Yield a sample, cut to the longest length or not at all, and count it.

        Raises:
            BadRecord: it is too long, and that is an error.
        """
        longest = self.seq_length
        if longest is not None and len(sample.ids) > longest:
            self.counts.overlong += 1
            if self.overlong == FAIL:
                raise BadRecord(f"has {len(sample.ids)} tokens, --seq-length is {longest}")
            kept = Sample(sample.ids[:longest], sample.labels[:longest])
            if self.overlong == DROP or all(label == IGNORED for label in kept.labels):
                self.counts.dropped += 1
                return
            self.counts.cut += any(label != IGNORED for label in sample.labels[longest:])
            sample = kept
        self.counts.samples += 1
        self.counts.tokens += len(sample.ids)
        self.counts.trained += sum(label != IGNORED for label in sample.labels)
        yield sample

    def _encoded(self, messages: Conversation, rendered: Rendered) -> Sample:
        encoder = self.encoder
        # Generation sees the prompt alone, and then what it generates.
        cuts = [begin for begin, _ in self._wanted(rendered.answers)] if self.tokenize == SEGMENTS else []
        before, ids, offsets = encoded(encoder, self.template, messages, rendered, cuts)
        labels = ids[:] if self.train_on == EVERYTHING else self._labels(ids, offsets, rendered.answers)
        after = [*encoder.after, *([encoder.eod] if self.append_eod else [])]
        others = before if self.train_on == EVERYTHING else [IGNORED] * len(before)
        return Sample([*before, *ids, *after], [*others, *labels, *after])

    def _labels(
        self, ids: Sequence[int], offsets: Sequence[tuple[int, int]], answers: Sequence[tuple[int, int]]
    ) -> list[int]:
        labels = [IGNORED] * len(ids)
        at = 0
        for begin, end in self._wanted(answers):
            self.counts.answers += 1
            first = True
            while at < len(ids) and offsets[at][0] < end:
                start, stop = offsets[at]
                if stop > begin:
                    self.counts.merged += first and start < begin
                    first = False
                    labels[at] = ids[at]
                at += 1
        return labels

    def _wanted(self, answers: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        return answers[-1:] if self.train_on == LAST else answers


def prompt_ids(encoder: TextEncoder, template: Template, messages: Sequence[Message]) -> list[int]:
    """Return the ids of a conversation up to where its next answer begins: those that training saw before it.

    Args:
        encoder: the tokenizer.
        template: writes the conversation.
        messages: of it, none of which is a special token, whatever it spells.

    Raises:
        BadRecord: the template refuses the messages, or hides one that spells out a special token.
        UserError: the tokenizer does not say which characters a token stands for.
    """
    before, ids, _ = encoded(encoder, template, messages, template.prompt(messages))
    return [*before, *ids]


def encoded(
    encoder: TextEncoder,
    template: Template,
    messages: Sequence[Message],
    rendered: Rendered,
    cuts: Sequence[int] = (),
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Return the ids before a written conversation, its own ids, and their spans of characters.

    Args:
        encoder: the tokenizer.
        template: that has written it.
        messages: of the conversation.
        rendered: what the template has written.
        cuts: characters before and behind which it is tokenized apart.

    Raises:
        BadRecord: a message spells out a special token, and the template does not show where messages are.
        UserError: the tokenizer does not say which characters a token stands for.
    """
    if rendered.content is None:
        spelled = next((t for t in encoder.special if any(t in m.content for m in messages)), None)
        if spelled is not None:
            raise BadRecord(
                f"spells out the special token {spelled!r}, and the template {template.name} does not show "
                "where messages are"
            )
    ids, offsets = encoder.written(rendered.text, rendered.content or (), cuts)
    # A template may write the first token itself; where a message spells it, it is text, and no such token.
    begun = ids[: len(encoder.before)] == encoder.before
    return [] if begun else encoder.before, ids, offsets
