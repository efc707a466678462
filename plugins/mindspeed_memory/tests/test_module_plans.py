"""Patterns of module names: what they match, and what is refused."""

import pytest
import torch

from mindspeed_core.activation import activate, prepare
from mindspeed_core.errors import UserError
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_memory.features.proofs import FUSED_LLAMA, PP2
from mindspeed_memory.patterns import Pattern, outermost
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

INSTALLED = Registry.discover()


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("decoder.layers.{*}", "decoder.layers.11", True),
        ("decoder.layers.{*}", "decoder.layers", False),
        ("decoder.layers.{*}", "decoder.layers.1.mlp", False),
        ("decoder.layers.{0-3}.mlp", "decoder.layers.3.mlp", True),
        ("decoder.layers.{0-3}.mlp", "decoder.layers.4.mlp", False),
        ("decoder.layers.{1,4-5}", "decoder.layers.5", True),
        ("decoder.layers.{1,4-5}", "decoder.layers.2", False),
        ("*.layers.*.linear_*", "decoder.layers.0.linear_qkv", True),
        ("*", "decoder.layers", False),
        ("block{*}_a", "block12_a", True),
        ("deco.er", "decoxer", False),
    ],
)
def test_names_match_part_by_part(pattern, name, matches):
    assert Pattern.of(pattern).matches(name) is matches


@pytest.mark.parametrize("text", ["", "a..b", "a.{x}", "a.{1-}", "a.{1", "a.}"])
def test_what_is_no_pattern_is_refused(text):
    with pytest.raises(ValueError, match=r"write|does not close"):
        Pattern.of(text)


def test_modules_inside_of_chosen_ones_are_left_to_them():
    assert outermost(["a.b", "a", "ab", "c.d.e", "c.d"]) == ["a", "ab", "c.d"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--recompute-plan", "decoder.{x}"), "--recompute-plan decoder.{x}: {x} holds no numbers"),
        (
            (
                *("--recompute-plan", "decoder", "--recompute-granularity", "full"),
                *("--recompute-method", "block", "--recompute-num-layers", "1"),
            ),
            "both say what is computed again; drop one of the two",
        ),
        (
            ("--swap-activation-plan", "decoder", "--use-flash-attn", "--swap-attention"),
            "saved-tensors",
        ),
        (("--swap-activation-plan", "decoder", "--swap-min-bytes", "-1"), "--swap-min-bytes -1 is negative"),
        (
            ("--swap-attention", "--use-flash-attn", "--swap-modules", "norm"),
            "--swap-modules norm: 'norm' is no module of a layer; there are input_norm, self_attention,",
        ),
        (("--swap-layer-input",), "whose input is all they keep"),
        (("--compress-activation", "0"), "it is exponents of bfloat16 that are compressed"),
        (
            ("--bf16", "--compress-activation", "3-9"),
            "--compress-activation 3-9: 3-9 is beyond the layers, which are 1 to 4",
        ),
        (("--bf16", "--compress-dense", "level0", "--compress-activation", "0"), "saved-tensors"),
        (("--bf16", "--compress-dense", "level0", "--recompute-activation-function"), "mlp-forward"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(flags, message):
    line = training_flags(flags, 1, INSTALLED)
    with pytest.raises(PlanError) as error:
        prepare(line, platform="cpu", registry=INSTALLED, host="standalone")
    assert message in str(error.value)


def swap_in_a_pipeline(*patterns):
    flags = (*FUSED_LLAMA, *PP2, "--swap-min-bytes", "1", "--swap-activation-plan", *patterns)
    line = training_flags(flags, 1, INSTALLED)
    with activate(line, platform="cpu", host="standalone", registry=INSTALLED) as session:
        try:
            run = loop.setup(session)
        except UserError as error:
            return str(error)
        session.call("train_step", run=run)
        moved = run.metrics.local()["swapped bytes"][1]
        loop.teardown(session)
    return moved


def swap_all():
    torch.manual_seed(0)
    return swap_in_a_pipeline("embedding"), swap_in_a_pipeline("decoder.layers.{9}")


def test_a_pattern_matches_on_one_stage_or_is_refused_with_what_there_is():
    found = run_world(swap_all, 2)
    for _, refused in found:
        assert "--swap-activation-plan decoder.layers.{9} matches no module; there are decoder" in refused
    # The embedding is on the first stage alone.
    assert found[1][0] == 0.0


def test_swapped_attention_brings_attention_that_saves_no_scores():
    session = prepare(
        training_flags(("--swap-attention",), 1, INSTALLED),
        platform="cpu",
        registry=INSTALLED,
        host="standalone",
    )
    assert {"swap-attention", "flash-attn"} <= set(session.plan.names)
