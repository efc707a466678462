"""Messages name flags that were given, ways out that hold, and what is left."""

from __future__ import annotations

import re

import pytest
from test_unread_flags import EXPERTS, FLAGS, MODEL, PP2, REGISTRY, TP2, planned

from mindspeed_core import check

CHIMERA = "--chimera-decouple-bw"
BF16 = ("--bf16", "--use-flash-attn")


@pytest.mark.parametrize(
    ("line", "words", "absent"),
    [
        ((*PP2, CHIMERA), "add --pipeline-schedule chimera", "--pipeline-schedule auto"),
        ((*PP2, "--pipeline-w-output-layer"), "add --pipeline-schedule zb-h1, zbi or zbv", "1f1b"),
        (
            (*BF16, "--compress-activation", "0", "--checkpoint-activations"),
            "which --checkpoint-activations stands for",
            "set --recompute-granularity",
        ),
        (
            (*BF16, "--compress-dense", "level0", "--checkpoint-activations"),
            "or drop --checkpoint-activations",
            "set --recompute-granularity",
        ),
        (
            (*PP2, "--pipeline-schedule", "zb-h1", "--automated-pipeline-perf"),
            "sizes are searched for 1f1b",
            "''",
        ),
    ],
)
def test_a_refusal_names_flags_that_were_given_and_a_way_out_that_holds(line, words, absent):
    checked = check([*MODEL, *line], world_size=2, registry=REGISTRY)
    text = "\n".join(map(str, checked.problems))

    assert words in text
    assert absent not in text


@pytest.mark.parametrize("layout", [(), TP2, PP2, EXPERTS], ids=["one", "tp2", "pp2", "experts"])
def test_no_way_out_is_refused_in_turn_for_what_it_adds(layout):
    """Type what the one problem of a flag says; the next answer may ask for more, not for less."""
    taken_back = []
    for line, _ in FLAGS.values():
        plan, problems = planned(*layout, *line)
        found = re.match(r"add (--[^,;(]+)", problems[0].remedy) if len(problems) == 1 else None
        if plan is not None or found is None:
            continue
        added = found[1].split(" or ")[0].split()
        _, further = planned(*layout, *line, *added)
        taken_back += [
            (line, added, problem.reason) for problem in further if f"drop {added[0]}" in problem.reason
        ]
    # A schedule needs stages, and says so.
    assert [found for found in taken_back if "--pipeline-model-parallel-size 1" not in found[2]] == []


@pytest.mark.parametrize(
    ("line", "feature", "words"),
    [
        (
            ("--recompute-norm", "--recompute-norm-num-layers", "0"),
            "recompute-norm",
            "num-layers 0 leaves no",
        ),
        (
            (
                *("--recompute-activation-function", "--recompute-granularity", "full"),
                *("--recompute-method", "block", "--recompute-num-layers", "4"),
            ),
            "recompute-activation",
            "--recompute-num-layers 4 computes every layer again as a whole, and none is left",
        ),
        (
            ("--use-flash-attn", "--swap-attention", "--swap-models", "decoder,0"),
            "swap-attention",
            "--swap-models decoder,0 leaves no layer to swap",
        ),
    ],
)
def test_a_feature_that_is_left_without_a_layer_is_held_back_with_the_number(line, feature, words):
    (held,) = check([*MODEL, *line], registry=REGISTRY).plan.held_back

    assert held.name == feature
    assert words in held.reason
