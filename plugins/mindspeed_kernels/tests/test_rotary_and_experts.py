"""Fused rotation, grouped experts, accumulating linear layers: what their proofs do not show."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from mindspeed_core.activation import prepare
from mindspeed_core.resolver.plan import PlanError
from mindspeed_kernels.modules.rope import packed_rotation, rotation, with_fused_rotation
from mindspeed_kernels.modules.weight_gradients import LinearWeightGradients
from mindspeed_testing.model_flags import training_flags


def configured(**values):
    plain = {"apply_rope_fusion": False, "rotary_interleaved": False, "multi_latent_attention": False}
    return SimpleNamespace(**{**plain, **values})


def never(*args, **options):
    raise AssertionError("the original was called")


fused = with_fused_rotation(never)
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("latent", "mscale"), [(False, 1.0), (True, 1.0), (True, 1.3)])
@pytest.mark.parametrize("width", [16, 12])
def test_rotation_is_that_of_megatron_core(interleaved, latent, mscale, width):
    torch.manual_seed(0)
    t, freqs = torch.randn(7, 2, 3, 16), torch.randn(7, 1, 1, width)
    expected = rope_utils._apply_rotary_pos_emb_bshd(t, freqs, interleaved, latent, mscale)
    config = configured(rotary_interleaved=interleaved, multi_latent_attention=latent)
    torch.testing.assert_close(fused(t, freqs, config, mscale=mscale), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("every_position", [False, True])
def test_packed_sequences_start_at_position_zero_each(every_position):
    torch.manual_seed(0)
    ends = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    t = torch.randn(8, 2, 16)
    freqs = torch.randn(8 if every_position else 6, 1, 1, 16)
    expected = rope_utils._apply_rotary_pos_emb_thd(t, ends, freqs, cp_group=ALONE)
    torch.testing.assert_close(fused(t, freqs, configured(), ends, cp_group=ALONE), expected)


def test_cosine_and_sine_are_computed_once_for_all_layers():
    freqs = torch.randn(7, 1, 1, 16)
    first = rotation(freqs, 1.0)
    assert all(a is b for a, b in zip(rotation(freqs, 1.0), first))
    ends = torch.tensor([0, 3, 6], dtype=torch.int32)
    packed = packed_rotation(freqs, 1.0, ends, 6)
    assert all(a is b for a, b in zip(packed_rotation(freqs, 1.0, ends, 6), packed))
    freqs.add_(1.0)
    torch.testing.assert_close(rotation(freqs, 1.0)[0], freqs.cos())


def test_the_original_serves_where_its_own_fusion_was_asked_for_or_a_sequence_is_split():
    called = []
    wrapped = with_fused_rotation(lambda *args: called.append(args))
    t, freqs = torch.randn(7, 2, 3, 16), torch.randn(7, 1, 1, 16)
    wrapped(t, freqs, configured(apply_rope_fusion=True))
    two = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    wrapped(t[:, 0], freqs, configured(), torch.tensor([0, 14]), 1.0, two)
    assert len(called) == 2


def newer(t, freqs, config, cu_seqlens=None, mscale=1.0, cp_group=None, mla_rotary_interleaved=False):
    """As megatron-core 0.19 has it: the caller says whether neighbours are pairs."""
    return mla_rotary_interleaved


@pytest.mark.parametrize("asked", [None, False, True])
def test_the_caller_says_whether_neighbours_are_pairs_where_it_can(asked):
    torch.manual_seed(0)
    t, freqs = torch.randn(7, 2, 3, 16), torch.randn(7, 1, 1, 16)
    latent, options = configured(multi_latent_attention=True), {}
    if asked is not None:
        options["mla_rotary_interleaved"] = asked
    turned = with_fused_rotation(newer)(t, freqs, latent, **options)
    expected = rope_utils._apply_rotary_pos_emb_bshd(t, freqs, False, bool(asked), 1.0)

    torch.testing.assert_close(turned, expected, rtol=1e-6, atol=1e-6)
    latent.apply_rope_fusion = True
    assert with_fused_rotation(newer)(t, freqs, latent, **options) is bool(asked)


@pytest.mark.parametrize("name", ["wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"])
def test_linear_layers_add_to_main_gradients_of_both_kinds(name):
    torch.manual_seed(0)
    x, dy = torch.randn(6, 8).bfloat16(), torch.randn(6, 4).bfloat16()
    main = torch.ones(4, 8, dtype=torch.float32 if name.endswith("32") else torch.bfloat16)
    getattr(LinearWeightGradients, name)(x, dy, main)
    expected = 1 + dy.float().t() @ x.float()
    torch.testing.assert_close(main.float(), expected, rtol=1e-2, atol=1e-2)


def plan(*flags):
    return prepare(training_flags(flags, 1), platform="cpu", host="standalone").plan


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--use-fused-rotary-pos-emb"], "--position-embedding-type"),
        (["--gemm-gradient-accumulation-fusion"], "only supported with --moe-grouped-gemm"),
        (["--moe-grouped-gemm", "--disable-bias-linear"], "nothing to group without experts"),
        (["--moe-grouped-gemm", "--num-experts", "4"], "--disable-bias-linear"),
        (["--use-gradient-accumulation-fusion", "--use-torch-fsdp2"], "no main gradient"),
    ],
)
def test_what_cannot_work_is_refused_by_name(flags, message):
    with pytest.raises(PlanError) as error:
        plan("--position-embedding-type", "learned_absolute", *flags)
    assert message in str(error.value)


def test_all_of_them_work_in_one_plan():
    active = plan(
        *("--position-embedding-type", "rope", "--use-fused-rotary-pos-emb"),
        *("--num-experts", "4", "--disable-bias-linear", "--moe-grouped-gemm"),
        *("--gemm-gradient-accumulation-fusion", "--use-gradient-accumulation-fusion"),
    )
    assert {"fused-rope", "grouped-experts", "gmm-add", "matmul-add"} <= set(active.names)
