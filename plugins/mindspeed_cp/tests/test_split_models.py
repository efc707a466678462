"""Other models and other attention's flags where a sequence is split: planned, refused, the same numbers."""

import math
from argparse import Namespace

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from mindspeed_core import check_feature
from mindspeed_core.activation import prepare
from mindspeed_core.feature import hookimpl
from mindspeed_core.resolver.plan import PlanError
from mindspeed_cp import attention_flags
from mindspeed_cp.engine.layout import contiguous, documents_zigzag, zigzag
from mindspeed_cp.engine.shift import shift_plan
from mindspeed_cp.features import SplitPredictions
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.training import train_side


def plan(*flags):
    command = training_flags(("--context-parallel-size", "2", *flags), 1)
    return prepare(command, platform="cpu", host="standalone").plan


@pytest.mark.parametrize(
    ("flag", "held"),
    [
        ("--use-flash-attn", ("flash-attn",)),
        ("--use-fusion-attn-v2", ("flash-attn", "fusion-attn-v2")),
        ("--triangle-attn", ("triangle-attn",)),
        ("--use-fused-masked-softmax", ("masked-softmax",)),
    ],
)
def test_other_attention_steps_back_and_says_why(flag, held):
    made = plan(flag)
    assert made.slots["core-attention"] == "context-parallel"
    assert not {*held} & {*made.names}
    (said,) = [entry for entry in made.held_back if entry.flag == flag]
    assert said.name == held[-1]
    assert "split sequence" in said.reason


def test_biases_by_distance_stay_without_their_kernel():
    for kind in ("2", "3"):
        made = plan(*_ALIBI, "--square-alibi-mask", "--fill-neg-inf", "--alibi-fusion-attn-type", kind)
        assert made.names == ("context-parallel", "alibi")


def test_predictions_of_further_tokens_bring_their_one_patch():
    assert check_feature(SplitPredictions) == []
    made = plan("--mtp-num-layers", "1")
    assert [patch.owner for patch in made.patches] == ["context-parallel-predictions"]
    assert plan().patches == ()


_ALIBI = ("--position-embedding-type", "alibi")


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (
            (*_ALIBI, "--context-parallel-algo", "adaptive_cp_algo"),
            ("--position-embedding-type alibi", "--context-parallel-algo adaptive_cp_algo"),
        ),
        (("--use-flash-attn", "--sparse-mode", "6"), ("--sparse-mode 6 needs the prefix",)),
        (("--use-flash-attn", "--sparse-mode", "7"), ("--sparse-mode 7", "--reset-attention-mask")),
        (
            ("--use-flash-attn", "--sparse-mode", "4", "--pre-tockens", "8", "--next-tockens", "1"),
            ("--next-tockens 1",),
        ),
        (("--use-flash-attn", "--next-tockens", "-2"), ("--next-tockens -2 hides the nearest",)),
        (
            ("--use-flash-attn", "--sparse-mode", "4", "--window-size", "8,0"),
            ("--sparse-mode 4 and --window-size",),
        ),
    ],
)
def test_what_other_flags_ask_for_and_nobody_computes_is_refused(flags, messages):
    with pytest.raises(PlanError) as error:
        plan(*flags)
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"qk_clip": True}, "--qk-clip needs"),
        ({"experimental_attention_variant": "dsa"}, "--experimental-attention-variant dsa"),
        ({"hybrid_override_pattern": "M*M*"}, "a state along the sequence"),
    ],
)
def test_models_that_ranks_cannot_share_are_refused_in_every_host(given, message):
    (problem,) = attention_flags.problems(Namespace(**given))
    assert message in problem


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"use_flash_attn": True, "sparse_mode": 4, "pre_tockens": 9}, 9),
        ({"use_flash_attn": True, "sparse_mode": 0, "pre_tockens": 9}, 9),
        ({"use_flash_attn": True, "sparse_mode": 2, "pre_tockens": 9}, None),
        ({"use_flash_attn": True, "sparse_mode": 0, "pre_tockens": 31}, None),
        ({"use_flash_attn": False, "sparse_mode": 4, "pre_tockens": 9}, None),
        ({}, None),
    ],
)
def test_a_band_is_what_fused_attention_would_take(given, found):
    assert attention_flags.band(given, 32) == found


def made(kind, length, ranks, ends):
    if kind == "documents":
        return documents_zigzag(sorted({*(end for end in ends if end < length), length}), ranks)
    return {"zigzag": zigzag, "contiguous": contiguous}[kind](length, ranks)


@settings(deadline=None)
@drawn(
    st.sampled_from(["zigzag", "contiguous", "documents"]),
    st.integers(8, 90),
    st.integers(2, 4),
    st.lists(st.integers(1, 89), max_size=6),
)
def test_every_position_is_followed_by_the_next_in_every_layout(kind, length, ranks, ends):
    layout = made(kind, length, ranks, ends)
    plans = [shift_plan(layout, rank) for rank in range(ranks)]
    most = plans[0].most
    begins = np.full(ranks * most + 1, -1)
    for rank, plan in enumerate(plans):
        begins[rank * most : rank * most + len(plan.first)] = layout.positions(rank)[list(plan.first)]
    assert begins[plans[0].origin] == 0
    for rank, plan in enumerate(plans):
        positions = layout.positions(rank)
        moved = np.roll(positions, -1)
        moved[list(plan.last)] = begins[list(plan.sources)]
        expected = np.where(positions == length - 1, -1, positions + 1)
        assert moved.tolist() == expected.tolist()


MODEL = ("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--adam-eps", "1e-3")
SPLIT = ("--context-parallel-size", "2", "--context-parallel-algo")


class BothWays:
    """A model whose queries see later keys."""

    @hookimpl(wrapper=True)
    def build_layer_spec(self):
        from megatron.core.transformer.enums import AttnMaskType

        spec = yield
        for layer in spec.layer_specs:
            layer.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
        return spec


@pytest.mark.thorough
def test_models_that_look_ahead_train_the_same_in_parts():
    probes = (f"{__name__}:BothWays",)
    whole = train_side(MODEL, 1, probes=probes)
    causal = train_side(MODEL, 1, initial=whole.initial)
    for algorithm in ("megatron_cp_algo", "kvallgather_cp_algo"):
        flags = (*MODEL, *SPLIT, algorithm, "--attention-mask-type", "general")
        split = train_side(flags, 2, initial=whole.initial, probes=probes)
        assert split.losses["lm loss"] == pytest.approx(whole.losses["lm loss"], rel=1e-6)
        assert split.grad_norms == pytest.approx(whole.grad_norms, rel=1e-5)
    assert whole.losses["lm loss"] != pytest.approx(causal.losses["lm loss"], rel=1e-4)


def apart(one, other):
    """Norm of the difference of all gradients of the first step, relative to the second's."""
    first, second = one.gradients[0].tensors, other.gradients[0].tensors
    wrong = sum(float((first[name].double() - second[name].double()).square().sum()) for name in second)
    return math.sqrt(wrong / sum(float(tensor.double().square().sum()) for tensor in second.values()))


@pytest.mark.thorough
def test_bfloat16_in_parts_is_as_close_to_float32_as_in_one():
    # Of the first step: from the second on, the weights differ as well.
    exact = train_side(MODEL, 1, steps=1)
    whole = apart(train_side((*MODEL, "--bf16"), 1, steps=1, initial=exact.initial), exact)
    for algorithm in ("megatron_cp_algo", "ulysses_cp_algo"):
        split = train_side((*MODEL, "--bf16", *SPLIT, algorithm), 2, steps=1, initial=exact.initial)
        assert apart(split, exact) < 1.05 * whole
