"""Experts of somebody else train the same on every layout, or are refused before they drift apart."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed_megatron.experts import draw_experts
from mindspeed_testing.training import train_side
from mindspeed_testing.worlds import WorldError

MODEL = "--num-experts 4 --moe-ffn-hidden-size 32 --num-layers 2 --moe-router-topk 2".split()
WHOLE = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1".split()


def trained(size, *flags, probe="Stacked"):
    return train_side((*MODEL, *flags), size, 1, probes=(f"foreign_experts:{probe}",))


def test_marked_experts_that_tensor_parallel_ranks_share_learn_as_in_one_process():
    one, two = trained(1), trained(2, *WHOLE)
    for key, tensor in one.initial.tensors.items():
        assert torch.equal(two.initial.tensors[key], tensor), key
    for key, gradient in one.gradients[0].tensors.items():
        torch.testing.assert_close(two.gradients[0].tensors[key], gradient, rtol=1e-4, atol=1e-6, msg=key)
    assert two.grad_norms[0] == pytest.approx(one.grad_norms[0], rel=1e-5)


def test_unmarked_experts_are_refused_with_parameter_module_and_feature():
    with pytest.raises(WorldError) as error:
        trained(2, *WHOLE, probe="Unmarked")
    text = str(error.value)
    assert (
        "decoder.layers.0.mlp.experts.up of foreign_experts.UnmarkedExperts (placed by own-experts)" in text
    )
    assert "lacks allreduce=False, tensor_model_parallel=True" in text
    assert "mark_expert_parameters(self, config)" in text


def test_every_rank_draws_all_experts_and_keeps_its_own():
    config = SimpleNamespace(use_cpu_initialization=True)

    def drawn(rank, size):
        torch.manual_seed(1)
        ep = SimpleNamespace(rank=lambda: rank, size=lambda: size)
        mine = draw_experts(4 // size, config, SimpleNamespace(ep=ep), lambda: torch.rand(1).item())
        return mine, torch.rand(1).item()

    whole, left = drawn(0, 1)
    first, second = drawn(0, 2), drawn(1, 2)
    assert first[0] + second[0] == whole
    assert first[1] == second[1] == left
