"""The modules inside megatron-core: a GPT layer with them equals one without, on values and gradients."""

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mindspeed_core.plain_norm import PlainNorm
from mindspeed_kernels.modules.activation import FusedSwiGLU, place_swiglu, use_activation_modules
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
