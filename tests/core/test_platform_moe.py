"""Experts spread over two processes: the all-to-all dispatcher and the router work on the cpu platform."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = r"""
import sys, types, warnings
warnings.simplefilter("ignore")
import torch
from mindspeed_core.megatron.global_state import destroy_megatron_state
from mindspeed_core.runtime.patches import PatchLedger
from mindspeed_core.platforms.cpu import CpuPlatform

torch.set_num_threads(1)
rank = int(sys.argv[1])
platform, ledger = CpuPlatform(), PatchLedger()
ledger.apply(platform.patches(), owner="cpu")
platform.open(types.SimpleNamespace(args=types.SimpleNamespace(), ledger=ledger))
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
model_parallel_cuda_manual_seed(3)
config = TransformerConfig(
    num_layers=1, hidden_size=16, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0,
    num_moe_experts=4, moe_router_topk=2, moe_token_dispatcher_type="alltoall", moe_router_dtype="fp32",
    expert_model_parallel_size=2, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
    add_bias_linear=False, moe_aux_loss_coeff=0.01,
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
assert experts and any(p.grad is not None and p.grad.abs().sum() > 0 for p in experts)
destroy_megatron_state()
torch.distributed.destroy_process_group()
ledger.revert()
print("loss", float(loss))
"""


def test_experts_on_two_processes_train(tmp_path):
    script = tmp_path / "moe.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            output, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-3000:]
            assert output.startswith("loss")
    finally:
        for process in ranks:
            process.kill()
            process.wait()
