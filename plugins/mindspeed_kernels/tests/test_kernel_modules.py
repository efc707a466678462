"""The modules inside megatron-core: a GPT layer with them equals one without, on values and gradients."""

import logging

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mindspeed_core.plain_norm import PlainNorm
from mindspeed_kernels.modules.activation import FusedSwiGLU, place_swiglu, use_activation_modules
from mindspeed_kernels.modules.core_attention import (
    FlashCoreAttention,
    place_attention,
    without_attention_recompute,
)
from mindspeed_kernels.modules.norm import FusedRMSNorm, place_rms_norm


class Placements:
    def __init__(self):
        self.counts = {}

    def place(self, owner, count):
        self.counts[owner] = self.counts.get(owner, 0) + count


class Tracker:
    """Stands for megatron-core's tracker of device random states."""

    def __init__(self):
        self.forks = 0

    def fork(self):
        self.forks += 1
        return torch.random.fork_rng()


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def tracker(monkeypatch):
    tracker = Tracker()
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    return tracker


def config(**changes):
    values = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "add_bias_linear": False,
    }
    return TransformerConfig(**{**values, **changes})


def block(**options):
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", **options)
    return TransformerBlockSubmodules(layer_specs=[layer] * 2, layer_norm=layer.submodules.input_layernorm)


def test_the_norm_equals_the_plain_one_and_loads_its_weights():
    plain = PlainNorm(config(), 32)
    fused = FusedRMSNorm(config(), 32)
    with torch.no_grad():
        plain.weight.normal_()
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(5, 2, 32)
    torch.testing.assert_close(fused(x), plain(x))


def test_the_norm_is_marked_for_sequence_parallelism():
    sharded = config(sequence_parallel=True, tensor_model_parallel_size=2)
    assert FusedRMSNorm(sharded, 32).weight.sequence_parallel
    assert not FusedRMSNorm(config(), 32).weight.sequence_parallel


def test_zero_centred_gamma_starts_at_zero_and_scales_by_one():
    centred = FusedRMSNorm(config(layernorm_zero_centered_gamma=True), 32)
    x = torch.randn(5, 2, 32)
    assert centred.weight.abs().max() == 0
    torch.testing.assert_close(centred(x), FusedRMSNorm(config(), 32)(x))


def test_the_norm_refuses_layernorm():
    with pytest.raises(ValueError, match="needs --normalization RMSNorm, got LayerNorm"):
        FusedRMSNorm(config(normalization="LayerNorm"), 32)


def test_every_norm_of_the_model_is_replaced():
    session = Placements()
    spec = place_rms_norm(session, block(qk_layernorm=True))
    assert session.counts == {"fused-rmsnorm": 9}
    assert spec.layer_norm.module is FusedRMSNorm


def test_the_latent_norms_of_multi_latent_attention_are_replaced():
    session = Placements()
    place_rms_norm(session, block(multi_latent_attention=True, qk_layernorm=True))
    assert session.counts == {"fused-rmsnorm": 9}


def mlp(model, submodules, groups_of_tensor_parallelism):
    torch.manual_seed(0)
    return MLP(
        model, submodules, ffn_hidden_size=model.ffn_hidden_size, tp_group=groups_of_tensor_parallelism
    )


@pytest.mark.parametrize("bias", [False, True])
def test_an_mlp_with_the_fused_activation_equals_one_without(groups, bias):
    options = {
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": bias,
    }
    group = parallel_state.get_tensor_model_parallel_group()
    spec = block().layer_specs[0].submodules.mlp.submodules
    plain = mlp(config(**options), spec, group)
    placed = place_swiglu(Placements(), block()).layer_specs[0].submodules.mlp.submodules
    fused = mlp(use_activation_modules(config(**options)), placed, group)
    fused.load_state_dict(plain.state_dict())
    assert isinstance(fused.activation_func, FusedSwiGLU)
    x = torch.randn(6, 2, 32)
    results = []
    for module in (plain, fused):
        inputs = x.clone().requires_grad_()
        output, _ = module(inputs)
        output.square().sum().backward()
        results.append((output, inputs.grad, module.linear_fc1.weight.grad))
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected)


def test_every_mlp_gets_the_activation_including_experts():
    session = Placements()
    layer = get_gpt_layer_local_spec(num_experts=2, normalization="RMSNorm")
    place_swiglu(session, TransformerBlockSubmodules(layer_specs=[layer]))
    assert session.counts == {"fused-swiglu": 2}


def test_the_activation_refuses_a_clamped_gate():
    with pytest.raises(ValueError, match=r"activation_func_clamp_value is 7\.0"):
        FusedSwiGLU(config(activation_func_clamp_value=7.0))


def core(kind, model, **options):
    arguments = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    return build_module(kind, config=model, **{**arguments, **options})


def tensors(sq=12, groups=4):
    torch.manual_seed(0)
    return (
        torch.randn(sq, 2, 4, 8, requires_grad=True),
        torch.randn(sq, 2, groups, 8, requires_grad=True),
        torch.randn(sq, 2, groups, 8, requires_grad=True),
    )


def native_mask(size=12):
    return torch.ones(1, 1, size, size, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_query_groups": 2},
        {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
        {"softmax_scale": 0.5},
    ],
    ids=["plain", "grouped-queries", "layer-scaling", "own-scale"],
)
def test_core_attention_equals_that_of_megatron(groups, tracker, monkeypatch, changes):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    model = config(**changes)
    arguments = {"layer_number": 3, "softmax_scale": model.softmax_scale}
    results = []
    for kind, mask in ((DotProductAttention, native_mask()), (FlashCoreAttention, None)):
        inputs = tensors(groups=model.num_query_groups)
        output = core(kind, model, **arguments)(*inputs, mask)
        output.square().sum().backward()
        results.append((output, *(tensor.grad for tensor in inputs)))
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_window_applies_to_the_layers_that_have_one():
    model = config(window_size=(3, 0), window_attn_skip_freq=2)
    assert core(FlashCoreAttention, model, layer_number=1).window == (3, 0)
    assert core(FlashCoreAttention, model, layer_number=2).window is None


def test_narrower_values_of_latent_attention_give_a_narrower_context():
    query, key, value = tensors()
    module = core(FlashCoreAttention, config(), k_channels=8, v_channels=4)
    assert module(query, key, value[..., :4], None).shape == (12, 2, 16)


def test_dropout_draws_from_the_ranks_own_state(tracker):
    module = core(FlashCoreAttention, config(attention_dropout=0.5))
    module(*tensors(), None)
    module.eval()(*tensors(), None)
    assert tracker.forks == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"attention_mask": torch.ones(1, 1, 12, 12, dtype=torch.bool)},
            "--create-attention-mask-in-dataloader",
        ),
        ({"attention_mask": None, "attn_mask_type": AttnMaskType.padding}, "--reset-attention-mask"),
        ({"attention_mask": None, "attention_bias": torch.zeros(1)}, "no attention bias"),
        ({"attention_mask": None, "packed_seq_params": PackedSeqParams()}, "packed sequences"),
    ],
)
def test_what_it_cannot_compute_is_refused_with_the_flag(arguments, message):
    with pytest.raises(ValueError, match=message):
        core(FlashCoreAttention, config())(*tensors(), **arguments)


def test_every_core_attention_is_replaced():
    session = Placements()
    place_attention(session, block())
    assert session.counts == {"flash-attn": 2}


def test_selective_recompute_leaves_attention_alone_and_says_so(caplog):
    model = config(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])
    with caplog.at_level(logging.WARNING):
        changed = without_attention_recompute(model)
    assert changed.recompute_modules == ["mlp"]
    assert "--recompute-granularity selective" in caplog.text
