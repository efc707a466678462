"""Small GPTs run under torch's own counter of operations; executed in a process of a test world."""

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_core.activation import prepare
from mindspeed_megatron.flops import count_flops
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_megatron.instruments.operations import operations
from mindspeed_megatron.instruments.passes import BACKWARD, FORWARD, RECOMPUTED, current_pass
from mindspeed_megatron.instruments.work_counter import WorkCounter
from mindspeed_megatron.layer_spec import NORM_ROLES, SpecEditor
from mindspeed_megatron.plain_norm import PlainNorm
from mindspeed_testing.model_flags import training_flags

# Without TransformerEngine megatron-core believes to have it here, and compares with what is not a class.
multi_latent_attention.HAVE_TE = False

SEQUENCE, VOCABULARY = 16, 48
COMMON = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "normalization": "RMSNorm",
}


class TwoProducts(torch.nn.Module):
    """Attention whose values have another width than its keys, which megatron-core's own refuses."""

    def __init__(self, config, **ignored):
        super().__init__()
        self.heads = config.num_attention_heads

    def forward(self, query, key, value, mask, **ignored):
        query, key, value = (states.permute(1, 2, 0, 3).flatten(0, 1) for states in (query, key, value))
        mixed = torch.bmm(torch.bmm(query, key.transpose(1, 2)).softmax(-1), value)
        return mixed.unflatten(0, (-1, self.heads)).permute(2, 0, 1, 3).flatten(2)


def counts(cases):
    """For each case ``{field: value}``: what torch counted, what was counted here without and as recomputed,
    and the `FlopCount` without mask."""
    with prepare([*training_flags((), 1), "--platform", "cpu"], host="standalone"):
        torch.distributed.init_process_group("gloo", init_method="env://")
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        try:
            return [count(dict(case)) for case in cases]
        finally:
            destroy_megatron_state()
            torch.distributed.destroy_process_group()


def count(case):
    kind = MLATransformerConfig if case.pop("multi_latent_attention", False) else TransformerConfig
    config = kind(**{**COMMON, **case})
    editor = SpecEditor(get_gpt_decoder_block_spec(config, use_transformer_engine=False), owner="")
    editor.replace(NORM_ROLES, PlainNorm)
    if kind is MLATransformerConfig:
        editor.replace("core_attention", TwoProducts)
    predictions = None
    if config.mtp_num_layers:
        predictions = get_gpt_mtp_block_spec(config, editor.spec, use_transformer_engine=False)
    model = GPTModel(
        config,
        editor.spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=predictions,
    )
    tokens = torch.randint(0, VOCABULARY, (1, SEQUENCE))
    positions = torch.arange(SEQUENCE).expand(1, SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    with FlopCounterMode(display=False) as counter, WorkCounter(current_pass) as own:
        model(tokens, positions, mask, labels=tokens).mean().backward()
    expected = count_flops(config, seq_length=SEQUENCE, vocab_size=VOCABULARY, causal=False)
    passes = {name: operations(work) for name, work in own.work.items()}
    needed = passes[FORWARD] + passes[BACKWARD]
    return counter.get_total_flops(), needed, passes.get(RECOMPUTED, 0.0), expected
