"""A program makes its groups by megatron-core's grid, and refits a model of another layout from its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from own_loop import described, of_the_batches, recorded

from mindspeed_core.activation import activate
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_testing import run_world

LLAMA = (
    *("--num-layers", "2", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
)
EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32"),
    *("--moe-token-dispatcher-type", "alltoall"),
)
KERNELS = (
    *("--use-flash-attn", "--use-fused-rmsnorm", "--use-fused-swiglu"),
    *("--use-fused-rotary-pos-emb", "--position-embedding-type", "rope"),
)
CASES = {
    "a dense model": (LLAMA, ()),
    "a dense model with features": (LLAMA, KERNELS),
    "experts with features": ((*LLAMA, *EXPERTS), KERNELS),
}
FURTHER = "tp_cp tp_ep tp_ep_pp tp_dp_cp dp_cp intra_dp_cp mp embd pos_embd expt_dp".split()


def groups_of_a_grid() -> ProcessGroupCollection:
    """The groups of two tensor-parallel ranks, none of them megatron-core's own."""
    grid = HyperCommGrid([2, 1, 1, 1, 1], ["tp", "cp", "ep", "dp", "pp"], backend="gloo")
    pg = ProcessGroupCollection()
    for name in ("tp", "cp", "ep", "dp", "pp"):
        setattr(pg, name, grid.create_pg(name))
    both, alone = pg.tp, pg.dp
    pg.expt_tp = both
    for name in FURTHER:
        setattr(pg, name, both if name.startswith("tp") or name == "mp" else alone)
    return pg


class Copies:
    """Copies between ranks over gloo: megatron-core's own asks for a CUDA stream."""

    requires_process_group_barrier = True

    def __init__(self) -> None:
        self.sent: list[tuple[int, torch.Tensor, int]] = []
        self.received: list[tuple[int, torch.Tensor, int]] = []

    def submit_send(self, src_tensor, dest_rank, task_id=None):
        self.sent.append((task_id, src_tensor.clone(), dest_rank))

    def submit_recv(self, dest_tensor, src_rank, task_id=None):
        self.received.append((task_id, dest_tensor, src_rank))

    def submit_send_with_id(self, task_id, src_tensor, dest_rank):
        self.submit_send(src_tensor, dest_rank, task_id)

    def submit_recv_with_id(self, task_id, dest_tensor, src_rank):
        self.submit_recv(dest_tensor, src_rank, task_id)

    def run(self):
        sent = [None] * dist.get_world_size()
        dist.all_gather_object(sent, [(task, tensor) for task, tensor, to in self.sent])
        here = {task: tensor for of_rank in sent for task, tensor in of_rank}
        for task, tensor, _ in self.received:
            tensor.copy_(here[task])


def refitted(model_flags, feature_flags):
    """Logits of a model that each rank has whole, and of a copy on two ranks with features."""
    from megatron.core.resharding.copy_services.base import CopyService
    from megatron.core.resharding.refit import swap_model_weights

    CopyService.register(Copies)
    with recorded(*model_flags, "--weight-decay", "0") as (memory, run):
        args = run.args
        # Each rank has samples of its own there.
        tokens = memory.batches[0][0].tokens
        dist.broadcast(tokens, 0)
    _, (config, *_) = described(*model_flags)
    flags = [*of_the_batches(args), *feature_flags]
    logits = []
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    whole = build(config, layers, args, ProcessGroupCollection.use_mpu_process_groups())
    for parameter in whole.parameters():
        dist.broadcast(parameter.data, 0)
    config = replace(config, tensor_model_parallel_size=2)
    with activate(flags, platform="cpu", configs=(config,)) as session:
        pg = groups_of_a_grid()
        session.build_groups(pg)
        config = session.config(config)
        parts = session.model(build(config, session.layer_spec(config), args, pg))
        swap_model_weights(whole, parts, Copies())
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        for model in (whole, parts):
            with torch.no_grad():
                logits.append(model.eval()(tokens, positions, None))
    gathered = [torch.empty_like(logits[1]) for _ in range(2)]
    dist.all_gather(gathered, logits[1].contiguous())
    destroy_megatron_state()
    return logits[0].numpy(), torch.cat(gathered, dim=-1).numpy()


def build(config, layers, args, pg):
    """Build a model whose groups are these."""
    return GPTModel(
        config,
        layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pg_collection=pg,
    )


def each(cases):
    return {case: refitted(*CASES[case]) for case in cases}


@pytest.fixture(scope="module")
def answers(asked_for):
    return run_world(each, 2, [case for case in CASES if case in asked_for("case")], timeout=200)


@pytest.mark.parametrize("case", CASES)
def test_a_model_on_groups_of_a_grid_is_refitted_and_answers_like_the_whole_one(answers, case):
    for rank in answers:
        whole, parts = rank[case]
        assert abs(whole - parts).max() < 1e-5 * abs(whole).max()
