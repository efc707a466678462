"""MindSpeed-LLM's spellings of how experts are chosen, weighted and balanced, for `translations`."""

from __future__ import annotations

from mindspeed_megatron.upstream.given import (
    ChangesNothing,
    Given,
    Line,
    Outcome,
    Refused,
    Translated,
    Translation,
)

_BALANCING, _SOFTMAX = "--moe-router-load-balancing-type", "--moe-router-pre-softmax"
_BEST, _BY_BEST = "--moe-router-best-of-group", "group_limited_greedy"


def unless_zero(option: str) -> Translation:
    """Return the translation of a flag that has another name here, and whose zero nobody reads there."""

    def translate(given: Given, line: Line) -> Outcome:
        if line.number(given.option, 1.0) == 0.0:
            return ChangesNothing("MindSpeed-LLM does not read a zero")
        return Translated((option, *given.words))

    return translate


def normalized_weights(given: Given, line: Line) -> Outcome:
    """``--norm-topk-prob``: weights of the chosen experts are divided by their sum."""
    if not line.has("--num-experts"):
        return ChangesNothing("the model has no experts")
    balancing = line.value("--moe-router-load-balancing-type", "aux_loss")
    if balancing == _BY_BEST:
        return ChangesNothing(f"{_BALANCING} {_BY_BEST} is read with it")
    if balancing not in ("aux_loss", "softmax_topk"):
        return ChangesNothing(f"MindSpeed-LLM reads it with aux_loss alone, not with {balancing}")
    if line.number("--moe-router-topk-scaling-factor", 1.0) not in (0.0, 1.0):
        return Refused(
            "dividing by the sum would undo --moe-router-topk-scaling-factor, as it does in MindSpeed-LLM",
            "leave out one of the two",
        )
    if line.value("--moe-router-score-function", "softmax") != "softmax":
        if line.number("--moe-router-topk", 2) == 1:
            return Refused(
                "with one expert a token it would make every weight one, which learns nothing",
                "leave it out",
            )
        return ChangesNothing("weights of a sigmoid are always divided by their sum")
    if not line.has("--moe-router-pre-softmax"):
        return ChangesNothing("the softmax is over the chosen experts, whose weights add up to one")
    return Translated(
        (),
        "a softmax over all experts, divided by the sum of the chosen ones, is a softmax over these",
        without=("--moe-router-pre-softmax",),
    )


def sequence_loss(given: Given, line: Line) -> Outcome:
    """``--seq-aux``: the balancing loss of each sequence."""
    if not line.has("--num-experts"):
        return ChangesNothing("the model has no experts")
    words = line.words("--moe-router-load-balancing-type")
    if "seq_aux_loss" in words:
        return ChangesNothing("--moe-router-load-balancing-type seq_aux_loss says the same")
    if words == (_BY_BEST,):
        return ChangesNothing(f"{_BALANCING} {_BY_BEST} is read with it")
    if words == ("pai_megatron_aux_loss",):
        return ChangesNothing("MindSpeed-LLM does not read it with pai_megatron_aux_loss")
    if words in ((), ("none",)) and not line.number("--moe-aux-loss-coeff", 0.0):
        return ChangesNothing("its loss has the factor --moe-aux-loss-coeff, which is zero")
    if words != ("none",):
        # MindSpeed-LLM reads it beside none alone, and its own default is another loss.
        asked = f"{_BALANCING} {' '.join(words)}" if words else f"the default of {_BALANCING}, aux_loss,"
        return Refused(
            f"{asked} asks for another loss",
            "keep one of the two; --moe-router-load-balancing-type seq_aux_loss is the loss of each sequence",
        )
    return Translated(
        ("--moe-router-load-balancing-type", "seq_aux_loss"),
        "the loss is computed without the bias of --moe-router-enable-expert-bias",
        without=("--moe-router-load-balancing-type",),
    )


def balancing_type(given: Given, line: Line) -> Outcome | None:
    """``--moe-router-load-balancing-type``: pai_megatron_aux_loss, group_limited_greedy, and others' own."""
    if given.words == ("pai_megatron_aux_loss",):
        return Translated(
            ("--moe-router-load-balancing-type", "aux_loss", "--moe-router-pre-softmax"),
            "the loss and the softmax over all experts are these; it reads no groups, no factor and no other "
            "score",
            without=(
                "--moe-router-pre-softmax",
                "--moe-router-score-function",
                "--moe-router-topk-scaling-factor",
                "--moe-router-num-groups",
                "--moe-router-group-topk",
            ),
        )
    if given.words == (_BY_BEST,) and line.knows(_BEST):
        return _by_best_of_group(line)
    nearest = {
        "softmax_topk": "none with --moe-router-pre-softmax is the nearest",
        "sparsemixer_topk": "sinkhorn or aux_loss are there",
        _BY_BEST: "aux_loss with --moe-router-num-groups and --moe-router-group-topk is the nearest",
    }
    word = given.words[0] if len(given.words) == 1 else ""
    if word in nearest:
        return Refused(f"{word} is a router of MindSpeed-LLM's own", nearest[word])
    return None


def _by_best_of_group(line: Line) -> Translated:
    """Return what ``group_limited_greedy`` is: groups by their best expert, weights of a softmax over all.

    With ``--norm-topk-prob`` and several experts a token, weights are divided by their sum, which is a
    softmax over the chosen ones, and the factor is not read. ``--seq-aux`` says which loss it adds.
    """
    loss = "seq_aux_loss" if line.has("--seq-aux") else "aux_loss"
    divided = line.has("--norm-topk-prob") and line.number("--moe-router-topk", 2) > 1
    weights, unread = ((), ("--moe-router-topk-scaling-factor",)) if divided else ((_SOFTMAX,), ())
    return Translated(
        (_BALANCING, loss, *weights, _BEST),
        "groups are ranked by their best expert"
        + (", and weights are a softmax over the chosen ones" if divided else ""),
        without=(_SOFTMAX, "--moe-router-score-function", *unread),
    )
