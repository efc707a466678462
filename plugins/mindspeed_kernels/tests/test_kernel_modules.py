"""The modules inside megatron-core: a GPT layer with them equals one without, on values and gradients."""

import warnings

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig, attention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mindspeed_kernels.modules.activation import FusedSwiGLU, place_swiglu, use_activation_modules
from mindspeed_kernels.modules.core_attention import place_attention
from mindspeed_kernels.modules.norm import FusedRMSNorm, place_rms_norm
from mindspeed_kernels.modules.rope import with_fused_rotation
from mindspeed_megatron.plain_norm import PlainNorm
from mindspeed_megatron.spec_forms import as_spec


class Placements:
    def __init__(self):
        self.counts = {}

    def place(self, owner, count, **roles):
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
    spec = as_spec(block().layer_specs[0].submodules.mlp).submodules
    plain = mlp(config(**options), spec, group)
    placed = as_spec(place_swiglu(Placements(), block()).layer_specs[0].submodules.mlp).submodules
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


def test_a_layer_with_every_fused_operator_is_captured_in_one_graph(groups, monkeypatch):
    spec = block()
    for place in (place_rms_norm, place_swiglu, place_attention):
        spec = place(Placements(), spec)
    options = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "num_query_groups": 2}
    model = config(hidden_dropout=0.0, bias_dropout_fusion=False, **options)
    rotate = with_fused_rotation(rope_utils.apply_rotary_pos_emb)
    monkeypatch.setattr(attention, "apply_rotary_pos_emb", rotate)
    torch.manual_seed(0)
    layer = build_module(spec.layer_specs[0], config=use_activation_modules(model), layer_number=1)
    x, angles = torch.randn(16, 2, 32), torch.randn(16, 1, 1, 8)
    torch._dynamo.reset()
    results = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        inputs = x.clone().requires_grad_()
        layer.zero_grad()
        # A layer of megatron-core warns about itself while it is traced.
        with torch._dynamo.config.patch(ignore_logging_functions={warnings.warn}):
            output = run(inputs, attention_mask=None, rotary_pos_emb=angles)[0]
        output.square().sum().backward()
        results.append((output, inputs.grad, [p.grad.clone() for p in layer.parameters()]))
    torch.testing.assert_close(results[1], results[0])
