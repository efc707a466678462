"""Experts spread over two processes: the all-to-all dispatcher and the router work on the cpu platform."""

from __future__ import annotations

import os
import types

from mindspeed_testing.worlds import run_world


def train():
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.platforms.cpu import CpuPlatform
    from mindspeed_core.runtime.patches import PatchLedger
    from mindspeed_megatron.global_state import destroy_megatron_state

    rank = int(os.environ["RANK"])
    platform, ledger = CpuPlatform(), PatchLedger()
    ledger.apply(platform.patches(), owner="cpu")
    platform.open(types.SimpleNamespace(args=types.SimpleNamespace(), ledger=ledger))

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(3)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        moe_router_dtype="fp32",
        expert_model_parallel_size=2,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        add_bias_linear=False,
        moe_aux_loss_coeff=0.01,
    )
    spec = get_gpt_layer_local_spec(num_experts=4)
    model = GPTModel(config, spec, vocab_size=32, max_sequence_length=8).cuda()
    torch.manual_seed(rank)
    tokens = torch.randint(0, 32, (2, 8), device="cuda")
    positions = torch.arange(8, device=torch.cuda.current_device()).expand(2, 8)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device="cuda").triu(1)
    loss = model(tokens, positions, mask, labels=tokens).mean()
    loss.backward()
    experts = [p for name, p in model.named_parameters() if "experts" in name]
    assert experts
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in experts)
    destroy_megatron_state()
    torch.distributed.destroy_process_group()
    ledger.revert()
    return float(loss)


def test_experts_on_two_processes_train():
    assert all(loss > 0 for loss in run_world(train, 2))
