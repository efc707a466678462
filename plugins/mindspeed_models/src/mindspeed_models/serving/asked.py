"""Bodies of OpenAI's completions and chat completions, as requests to the model.

Fields that OpenAI has and that change an answer are either done or refused, never passed over. Beyond
OpenAI's there are ``top_k``, ``min_tokens`` and ``repetition_penalty``.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_core.errors import ArgumentError, UserError
from mindspeed_models.data.conversation import BadRecord, Message, openai_messages
from mindspeed_models.inference.requests import (
    MAX_SEED,
    GenerationRequest,
    GenerationSettings,
    check_prompt,
)
from mindspeed_models.serving.fields import Fields
from mindspeed_models.serving.prompts import Prompts
from mindspeed_models.serving.settings import Limits, Refused
from mindspeed_models.serving.waiting import with_id

_OPENAI_TOKENS = 16
_MOST_STOPS = 16
_MOST_TOKENS = 1 << 31
_MOST_LIKELIEST = 20
"""Likeliest tokens in the place of each, as many as OpenAI gives."""
_FLAG_FIELDS = {
    "--max-new-tokens": "max_tokens",
    "--max-length": "max_tokens",
    "--min-new-tokens": "min_tokens",
    "--prompt": "prompt",
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and names that requests may use.

    Attributes:
        vocab_size: tokens.
        max_positions: tokens of prompt and answer together.
        names: of the model, for requests that name none, and of its adapters.
        adapters: the names among them that are adapters.
    """

    vocab_size: int
    max_positions: int
    names: tuple[str, ...]
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Asked:
    """One request of a client.

    Attributes:
        chat: of the chat's form.
        model: the name that it gave.
        requests: one for each answer, in the order of ``index``.
        echoes: what goes before each answer's text.
        prompt_tokens: of all prompts, each counted once.
        stream: pieces are sent as they come.
        usage: the stream ends with the numbers of tokens.
        logprobs: those of the chosen tokens are wanted, and of so many likeliest ones; None for none.
    """

    chat: bool
    model: str
    requests: tuple[GenerationRequest, ...]
    echoes: tuple[str, ...]
    prompt_tokens: int
    stream: bool
    usage: bool
    logprobs: int | None


def read_completion(body: dict[str, Any], prompts: Prompts, sizes: Sizes, limits: Limits) -> Asked:
    """Read the body of ``/v1/completions``.

    Raises:
        Refused: a field is wrong, or asks for what is not done here.
    """
    fields = Fields(body)
    encoded, texts = _prompts(fields.raw("prompt"), prompts, limits)
    echo = fields.switch("echo")
    for name, allowed, why in (
        ("suffix", ("",), "nothing is inserted before a given end here"),
        ("best_of", (1,), "one answer is generated for each"),
    ):
        fields.only(name, allowed, why)
    logprobs = fields.whole("logprobs", None, 0, min(_MOST_LIKELIEST, sizes.vocab_size))
    if echo and logprobs is not None:
        raise Refused(400, "echo: no log-probabilities of prompts are given; drop logprobs", param="echo")
    return _asked(
        fields, False, encoded, [text if echo else "" for text in texts], sizes, limits, logprobs=logprobs
    )


def read_chat(body: dict[str, Any], prompts: Prompts, sizes: Sizes, limits: Limits) -> Asked:
    """Read the body of ``/v1/chat/completions``.

    Raises:
        Refused: a field is wrong, or asks for what is not done here.
    """
    fields = Fields(body)
    messages = _messages(fields.raw("messages"))
    for name, why in (
        ("tools", "no tools are called here"),
        ("functions", "no functions are called here"),
        ("modalities", "text alone is answered"),
        ("audio", "text alone is answered"),
        ("prediction", "nothing is predicted here"),
    ):
        fields.only(name, ([], ["text"]), why)
    fields.only("tool_choice", ("none", "auto"), "no tools are called here")
    fields.only("function_call", ("none", "auto"), "no functions are called here")
    fields.only("response_format", ({"type": "text"},), "answers are free text")
    likeliest = fields.whole("top_logprobs", None, 0, min(_MOST_LIKELIEST, sizes.vocab_size))
    logprobs = (likeliest or 0) if fields.switch("logprobs") else None
    if likeliest and logprobs is None:
        raise Refused(
            400, f"top_logprobs {likeliest} needs logprobs true; add it, or drop both", param="top_logprobs"
        )
    try:
        encoded = prompts.chat(messages)
    except UserError as error:
        raise Refused(400, str(error), param="messages") from error
    return _asked(fields, True, [encoded], [""], sizes, limits, logprobs=logprobs)


def _asked(
    fields: Fields,
    chat: bool,
    encoded: Sequence[list[int]],
    echoes: Sequence[str],
    sizes: Sizes,
    limits: Limits,
    *,
    logprobs: int | None,
) -> Asked:
    model = fields.raw("model") or sizes.names[0]
    if model not in sizes.names:
        known = ", ".join(sizes.names)
        raise Refused(
            404,
            f"model {str(model)[:80]!r} is not served here; there is {known}",
            param="model",
            code="model_not_found",
        )
    stream = fields.switch("stream")
    usage = _include_usage(fields, stream)
    wanted = fields.whole("n", 1, 1, limits.choices)
    assert wanted is not None
    if wanted * len(encoded) > limits.choices:
        raise Refused(
            400,
            f"n {wanted}: {wanted * len(encoded)} answers are asked for, {limits.choices} at most",
            param="n",
        )
    length = _length(fields, chat, limits)
    seed = fields.whole("seed", None, 0, MAX_SEED - limits.choices)
    temperature = fields.number("temperature", 1.0, 0, 100)
    minimum = fields.whole("min_tokens", 0, 0, _MOST_TOKENS)
    top_k = fields.whole("top_k", 0, 0, _MOST_TOKENS)
    assert minimum is not None
    assert top_k is not None
    common: dict[str, Any] = {
        "do_sample": temperature > 0,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": fields.number("top_p", 1.0, 0, 1),
        "min_new_tokens": minimum,
        "repetition_penalty": fields.number("repetition_penalty", 1.0, 0, 100),
        "stop": fields.texts("stop", _MOST_STOPS),
        "seed": secrets.randbits(31) if seed is None else seed,
        "logprobs": logprobs,
    }
    for name in ("presence_penalty", "frequency_penalty"):
        fields.only(name, (0, 0.0), "there is repetition_penalty instead")
    fields.only("logit_bias", ({},), "tokens are not favoured here")
    fields.ignore("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
    fields.finish()
    # The empty name stands for the model without any of its adapters.
    adapter = model if model in sizes.adapters else "" if sizes.adapters else None
    requests = []
    texts = []
    for at, prompt in enumerate(encoded):
        for number in range(wanted):
            settings = GenerationSettings(**common, max_new_tokens=_room(prompt, length, sizes, limits, chat))
            request = GenerationRequest(prompt, settings, adapter=adapter)
            _check(request, sizes)
            requests.append(with_id(request, at * wanted + number))
            texts.append(echoes[at])
    tokens = sum(map(len, encoded))
    return Asked(chat, model, tuple(requests), tuple(texts), tokens, stream, usage, logprobs)


def _length(fields: Fields, chat: bool, limits: Limits) -> int | None:
    most = limits.new_tokens or _MOST_TOKENS
    newer = fields.whole("max_completion_tokens", None, 1, most) if chat else None
    older = fields.whole("max_tokens", None, 1, most)
    if newer is not None and older is not None and newer != older:
        raise Refused(400, "max_tokens and max_completion_tokens contradict each other", param="max_tokens")
    found = newer if newer is not None else older
    return found if found is not None or chat else min(_OPENAI_TOKENS, most)


def _room(prompt: Sequence[int], length: int | None, sizes: Sizes, limits: Limits, chat: bool) -> int:
    if length is not None:
        return length
    room = sizes.max_positions - len(prompt)
    if room < 1:
        raise Refused(
            400,
            f"the {'messages have' if chat else 'prompt has'} {len(prompt)} tokens, the model has "
            f"{sizes.max_positions} positions; shorten them",
            param="messages" if chat else "prompt",
            code="context_length_exceeded",
        )
    return min(room, limits.new_tokens or room)


def _check(request: GenerationRequest, sizes: Sizes) -> None:
    settings = request.settings
    try:
        settings.validate(vocab_size=sizes.vocab_size, max_positions=sizes.max_positions)
        check_prompt(request.prompt, settings, vocab_size=sizes.vocab_size, max_positions=sizes.max_positions)
    except ArgumentError as error:
        field = _FLAG_FIELDS.get(error.flag, error.flag.lstrip("-").replace("-", "_"))
        text = str(error).replace(error.flag, field, 1)
        for flag, name in _FLAG_FIELDS.items():
            text = text.replace(flag, name)
        long = len(request.prompt) + settings.max_new_tokens > sizes.max_positions
        code = "context_length_exceeded" if long else ""
        raise Refused(400, text, param=field, code=code) from error


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.raw("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not stream:
        raise Refused(400, "stream_options is an object beside stream true", param="stream_options")
    inner = Fields(options)
    usage = inner.switch("include_usage")
    inner.ignore("include_obfuscation")
    inner.finish()
    return usage


def _prompts(value: Any, prompts: Prompts, limits: Limits) -> tuple[list[list[int]], list[str]]:
    if value is None:
        raise Refused(400, "prompt is missing", param="prompt")
    several = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not several:
        raise Refused(400, "prompt is an empty list", param="prompt")
    if len(several) > limits.choices:
        raise Refused(400, f"prompt holds {len(several)} prompts, {limits.choices} at most", param="prompt")
    encoded = []
    texts = []
    for each in several:
        if isinstance(each, str):
            try:
                encoded.append(prompts.text(each))
            except UserError as error:
                raise Refused(400, str(error), param="prompt") from error
            texts.append(each)
        elif _is_ids(each):
            encoded.append(list(each))
            texts.append(prompts.spell(each))
        else:
            raise Refused(400, "prompt is neither text nor ids, nor a list of them", param="prompt")
    return encoded, texts


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, int) and not isinstance(each, bool) for each in value)
    )


def _messages(value: Any) -> Sequence[Message]:
    if value is None:
        raise Refused(400, "messages is missing", param="messages")
    try:
        return openai_messages({"messages": value})
    except BadRecord as error:
        raise Refused(400, f"messages: {error}", param="messages") from error
