"""Triangle attention, the masked softmax, repeatable runs and the cross entropy: equal, lean, refused."""

import os

import pytest
import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import attention_mask_func

from mindspeed_core.activation import activate
from mindspeed_core.errors import UserError
from mindspeed_kernels.modules.cross_entropy import calculate_predicted_logits
from mindspeed_kernels.modules.masked_softmax import MaskedSoftmax
from mindspeed_kernels.modules.triangle_attention import TriangleCoreAttention
from mindspeed_kernels.ops import (
    Backend,
    BackendError,
    ContractError,
    npu_fusion_attention,
    rms_norm,
    scaled_masked_softmax,
    triangle_attention,
)


def heads(size, ratio=2, width=8, dtype=torch.float32):
    torch.manual_seed(size)
    return (
        torch.randn(size, 1, 2 * ratio, width, dtype=dtype),
        torch.randn(size, 1, 2, width, dtype=dtype),
        torch.randn(size, 1, 2, width, dtype=dtype),
    )


def gradients(function, tensors):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    result = function(*leaves)
    (result * torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result)).sum().backward()
    return result.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("size", [1, 15, 16, 17, 3 * 16 + 5])
@pytest.mark.parametrize("ratio", [1, 4])
def test_triangle_attention_equals_flash_attention(size, ratio):
    tensors = heads(size, ratio)
    got = gradients(lambda q, k, v: triangle_attention(q, k, v, None, 16), tensors)
    expected = gradients(
        lambda q, k, v: npu_fusion_attention(q, k, v, 2 * ratio, "SBND", scale=8**-0.5, sparse_mode=2)[0],
        tensors,
    )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def kept_bytes(function, *inputs):
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function(*inputs)
    del result
    return sum(size for size in storages.values() if size > 1 << 16)


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_triangle_attention_keeps_the_triangle_only(blocks):
    tensors = [tensor.requires_grad_() for tensor in heads(512)]
    whole = kept_bytes(lambda q, k, v: triangle_attention(q, k, v, None, 512), *tensors)
    part = kept_bytes(lambda q, k, v: triangle_attention(q, k, v, None, 512 // blocks), *tensors)
    assert part / whole == pytest.approx((blocks + 1) / (2 * blocks), rel=0.15)


def test_triangle_attention_drops_weights_and_keeps_the_mean():
    query, key, _ = heads(64)
    value = torch.ones(64, 1, 2, 8)
    torch.manual_seed(0)
    mean = torch.stack([triangle_attention(query, key, value, None, 16, 0.5) for _ in range(50)]).mean()
    assert abs(float(mean) - 1.0) < 0.05


def test_triangle_attention_refuses_other_lengths():
    query, key, value = heads(6)
    with pytest.raises(ContractError, match="key must have the length and width of query"):
        triangle_attention(query, key[:4], value[:4])


def config(**changes):
    values = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0}
    return TransformerConfig(**{**values, **changes})


def triangle(**changes):
    return TriangleCoreAttention(config(**changes), 1, AttnMaskType.causal, "self", block_size=4)


def test_the_module_of_triangle_attention_merges_heads():
    query, key, value = heads(6)
    expected = triangle_attention(query, key, value).flatten(2)
    torch.testing.assert_close(triangle()(query, key, value, None), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.zeros(1)}, "a mask tensor"),
        ({"attention_mask": None, "attention_bias": torch.zeros(1)}, "an attention bias"),
        ({"attention_mask": None, "attn_mask_type": AttnMaskType.no_mask}, "of kind"),
    ],
)
def test_the_module_of_triangle_attention_is_causal_only_in_training(arguments, message):
    with pytest.raises(UserError, match=f"--triangle-attn.*{message}"):
        triangle()(*heads(6), **arguments)
    with pytest.raises(ValueError, match=r"--triangle-attn.*window_size is \(3, 0\)"):
        triangle(window_size=(3, 0))


def native_softmax(kind=AttnMaskType.causal, scale=None, dtype=torch.float32, **options):
    return FusedScaleMaskSoftmax(
        dtype == torch.float16,
        dtype == torch.bfloat16,
        kind,
        False,
        attention_mask_func,
        True,
        scale,
        **options,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 3.0])
def test_the_softmax_equals_that_of_megatron(dtype, scale, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 7, 7).to(dtype)
    mask = torch.rand(2, 1, 7, 7) < 0.3
    mask[..., 0] = False
    native = native_softmax(AttnMaskType.padding, scale, dtype)
    for given in (mask, None):
        got, expected = MaskedSoftmax(native)(scores, given), native(scores, given)
        assert got.dtype == dtype
        torch.testing.assert_close(got.to(expected.dtype), expected, rtol=1e-2, atol=2e-3)


def test_the_softmax_hides_the_future_windows_and_whole_rows():
    scores = torch.randn(1, 2, 5, 5)
    causal = MaskedSoftmax(native_softmax())(scores, None)
    assert causal.triu(1).abs().max() == 0
    windowed = MaskedSoftmax(native_softmax(window_size=(1, 0)))(scores, None)
    distance = torch.arange(5)[:, None] - torch.arange(5)
    assert windowed[..., (distance > 1) | (distance < 0)].abs().max() == 0
    mask = torch.zeros(1, 1, 5, 5, dtype=torch.bool)
    mask[..., 2, :] = True
    hidden = scaled_masked_softmax(scores, mask)
    assert hidden[..., 2, :].abs().max() == 0
    torch.testing.assert_close(hidden[..., 3, :].sum(-1), torch.ones(1, 2))


def test_the_softmax_takes_a_further_score_of_every_row():
    scores, offset = torch.randn(1, 2, 4, 4), torch.tensor([0.5, -1.0])
    got = MaskedSoftmax(native_softmax(scale=2.0))(scores, None, offset)
    full = torch.cat((scores * 2.0, offset.view(1, 2, 1, 1).expand(1, 2, 4, 1)), -1)
    hidden = torch.nn.functional.pad(torch.ones(4, 4).triu(1).bool(), (0, 1))
    torch.testing.assert_close(got, full.masked_fill(hidden, float("-inf")).softmax(-1)[..., :-1])


def test_the_softmax_keeps_its_result_only():
    scores = torch.randn(2, 4, 128, 128).bfloat16().requires_grad_()
    assert kept_bytes(scaled_masked_softmax, scores) == scores.untyped_storage().nbytes()


def test_two_masks_of_the_softmax_are_refused():
    with pytest.raises(ContractError, match="mask must be None with fixed_triu_mask"):
        scaled_masked_softmax(
            torch.randn(1, 1, 4, 4), torch.zeros(1, 1, 4, 4, dtype=torch.bool), 1.0, fixed_triu_mask=True
        )


@pytest.mark.parametrize("start", [0, 8])
def test_the_cross_entropy_equals_that_of_megatron_infinite_logits_included(start):
    torch.manual_seed(0)
    logits = torch.randn(5, 2, 8)
    logits[..., -2:] = float("-inf")
    target = torch.randint(0, 16, (5, 2))
    largest = logits.max(-1)[0]
    native = VocabParallelCrossEntropy.calculate_predicted_logits
    expected = native(logits.clone(), target, largest, start, start + 8)
    got = calculate_predicted_logits(logits.clone(), target, largest, start, start + 8)
    for mine, other in zip(got, expected):
        assert torch.equal(mine, other)


def test_a_repeatable_session_refuses_what_does_not_repeat_and_takes_everything_back():
    rms_norm.add(Backend("rms_norm", "loose", rms_norm.reference, priority=50, deterministic=False))
    before = os.environ.get("PYTHONHASHSEED")
    try:
        with activate(["--deterministic-ops"], host="standalone", platform="cpu"):
            assert torch.are_deterministic_algorithms_enabled()
            assert rms_norm.choose(rms_norm.call_of(torch.ones(2), torch.ones(2))).name == "rows"
        with activate(
            ["--npu-deterministic", "--ops-backend", "rms_norm=loose"], host="standalone", platform="cpu"
        ):
            with pytest.raises(BackendError, match=r"loose.*not deterministic"):
                rms_norm(torch.ones(2), torch.ones(2))
        assert rms_norm.choose(rms_norm.call_of(torch.ones(2), torch.ones(2))).name == "loose"
    finally:
        rms_norm.remove("loose")
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ.get("PYTHONHASHSEED") == before
