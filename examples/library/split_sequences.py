"""A plain training script on megatron-core whose sequences are split over ranks.

The script loads whole sequences on every rank; a session splits them, and attention reaches across ranks. It
trains once with sequences split over all ranks, once with whole sequences, and compares.

    torchrun --standalone --nproc-per-node 2 examples/library/split_sequences.py
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

VOCABULARY, LENGTH, BATCH, STEPS, UNTAUGHT = 64, 32, 4, 20, 11


def model_config(ranks: int) -> TransformerConfig:
    """A small GPT whose sequences are split over some ranks."""
    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        context_parallel_size=ranks,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        pipeline_dtype=torch.float32,
    )


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Whole sequences, the same on every rank; their first tokens do not count, as those of a prompt."""
    generator = torch.Generator().manual_seed(7)
    while True:
        first = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
        numbers = (first + stride * torch.arange(LENGTH + 1)) % VOCABULARY
        yield {
            "tokens": numbers[:, :-1],
            "labels": numbers[:, 1:],
            "loss_mask": (torch.arange(LENGTH) >= UNTAUGHT).float().expand(BATCH, LENGTH),
            "position_ids": torch.arange(LENGTH).expand(BATCH, LENGTH),
        }


def summed_loss(loss_mask: torch.Tensor, token_losses: torch.Tensor) -> tuple[Any, ...]:
    """The sum over the tokens that count, how many they are, and both for the log."""
    total, tokens = (token_losses * loss_mask).sum(), loss_mask.sum()
    return total, tokens.int(), {"loss": torch.stack([total.detach(), tokens])}


def train(ranks: int, flags: Mapping[str, Any]) -> list[float]:
    """The script; the loss of each step."""
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    config = model_config(ranks)
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
        options = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.0, adam_eps=1e-3)
        optimizer = session.wrap_optimizer(get_megatron_optimizer(options, chunks))
        config.finalize_model_grads_func = session.finalize_gradients()

        def forward(data: Iterator[Any], chunk: Any) -> tuple[torch.Tensor, Any]:
            # From here on it is this rank's part: which tokens says batch["packed_seq_params"].
            batch = session.batch(next(data))
            output = chunk(
                batch["tokens"],
                batch["position_ids"],
                None,
                labels=batch["labels"],
                packed_seq_params=batch.get("packed_seq_params"),
            )
            return output, session.loss(partial(summed_loss, batch["loss_mask"]), batch)

        schedule, step = session.forward_backward(), session.forward_step(forward)
        data, losses = batches(), []
        for _ in range(STEPS):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            reports = schedule(
                forward_step_func=step,
                data_iterator=[data],
                model=chunks,
                num_microbatches=2,
                seq_length=LENGTH,
                micro_batch_size=BATCH,
                forward_only=False,
            )
            optimizer.step()
            losses.append(mean_over_ranks([report["loss"] for report in reports]))
    parallel_state.destroy_model_parallel()
    return losses


def mean_over_ranks(reports: list[torch.Tensor]) -> float:
    """The mean over the tokens of all micro-batches, and of all ranks that a batch is spread over."""
    sums = torch.stack(reports).sum(dim=0)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    total, tokens = sums.tolist()
    return float(total / tokens)


def main() -> None:
    """Train with split and with whole sequences, and compare."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = dist.get_world_size()
    split = train(ranks, {"context_parallel_algo": "ulysses_cp_algo"} if ranks > 1 else {})
    whole = train(1, {})
    if dist.get_rank() == 0:
        print(f"loss of sequences over {ranks} ranks: {split[0]:.4f} -> {split[-1]:.4f}")
        print(f"loss of whole sequences:     {whole[0]:.4f} -> {whole[-1]:.4f}")
    assert split[-1] < 0.8 * split[0], "nothing was learned"
    torch.testing.assert_close(torch.tensor(split), torch.tensor(whole), rtol=1e-4, atol=1e-5)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
