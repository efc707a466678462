"""A plain training script on megatron-core, with three fused kernels: every line that speaks of the session.

The script builds its own configuration, model, optimizer and schedule. Without the lines marked with a
session it is an ordinary megatron-core script, and trains the same: the last assertion compares the two.

    python examples/library/plain_megatron_core.py
    torchrun --standalone --nproc-per-node 2 examples/library/plain_megatron_core.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from mindspeed_core import activate

VOCABULARY, LENGTH, BATCH, STEPS = 64, 32, 4, 20
FUSED = {"use_fused_rmsnorm": True, "use_fused_swiglu": True, "use_flash_attn": True}


def start() -> None:
    """One process, or those of torchrun; megatron-core's groups."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())


def model_config() -> TransformerConfig:
    """A small Llama."""
    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=dist.get_world_size(),
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        pipeline_dtype=torch.float32,
    )


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Numbers that count up from a random start, in steps of one to three: there is something to learn."""
    generator = torch.Generator().manual_seed(7)
    while True:
        first = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
        numbers = (first + stride * torch.arange(LENGTH + 1)) % VOCABULARY
        yield {
            "tokens": numbers[:, :-1],
            "labels": numbers[:, 1:],
            "loss_mask": torch.ones(BATCH, LENGTH),
            "position_ids": torch.arange(LENGTH).expand(BATCH, LENGTH),
        }


def mean_loss(loss_mask: torch.Tensor, token_losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """The mean over the tokens that count."""
    loss = (token_losses * loss_mask).sum() / loss_mask.sum()
    return loss, {"loss": loss.detach().clone()}


def train(flags: Mapping[str, Any]) -> list[float]:
    """The script; the loss of each step."""
    config = model_config()
    with activate(flags, configs=[config]) as session:
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        torch.manual_seed(1234)
        config = session.config(config)
        model = session.model(
            GPTModel(
                config,
                session.layer_spec(config),
                vocab_size=VOCABULARY,
                max_sequence_length=LENGTH,
                position_embedding_type="rope",
            )
        )
        chunks = session.wrap_ddp([model], DistributedDataParallelConfig())
        optimizer = session.wrap_optimizer(
            get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.0), chunks)
        )
        config.finalize_model_grads_func = session.finalize_gradients()

        def forward(data: Iterator[Any], chunk: Any) -> tuple[torch.Tensor, Any]:
            batch = session.batch(next(data))
            output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
            return output, session.loss(partial(mean_loss, batch["loss_mask"]), batch)

        schedule, forward = session.forward_backward(), session.forward_step(forward)
        data, losses = batches(), []
        for _ in range(STEPS):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            reports = schedule(
                forward_step_func=forward,
                data_iterator=[data],
                model=chunks,
                num_microbatches=2,
                seq_length=LENGTH,
                micro_batch_size=BATCH,
                forward_only=False,
            )
            optimizer.step()
            losses.append(float(torch.stack([report["loss"] for report in reports]).mean()))
        if flags:
            changed = session.report()["modules"].items()
            assert changed >= {"flash-attn": 2, "fused-rmsnorm": 5, "fused-swiglu": 2}.items(), changed
    return losses


def main() -> None:
    """Train with and without the kernels, and compare."""
    start()
    fused = train(FUSED)
    plain = train({})
    if dist.get_rank() == 0:
        print(f"loss with fused kernels: {fused[0]:.4f} -> {fused[-1]:.4f}")
        print(f"loss without:            {plain[0]:.4f} -> {plain[-1]:.4f}")
    assert fused[-1] < 0.8 * fused[0], "nothing was learned"
    torch.testing.assert_close(torch.tensor(fused), torch.tensor(plain), rtol=1e-4, atol=1e-5)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
