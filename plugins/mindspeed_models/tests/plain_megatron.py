"""A converted checkpoint in a plain model of megatron-core, in a process that knows nothing of this project.

``python plain_megatron.py SOURCE CHECKPOINT`` reads the checkpoint with megatron-core's own reader and prints
the largest difference of logits from the reference in SOURCE, relative to the largest logit. The model comes
from the arguments in the checkpoint, as Megatron-LM's ``--use-checkpoint-args`` takes them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils

FIELDS = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
    "add_bias_linear add_qkv_bias qk_layernorm moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax"
).split()


def use_the_cpu() -> None:
    """Let megatron-core's states of random numbers be those of the CPU: this process has no other device."""
    parallel_random._get_cuda_rng_state = lambda *given, **named: torch.get_rng_state()
    parallel_random._set_cuda_rng_state = lambda state, *given, **named: torch.set_rng_state(state)
    tracker = parallel_random.get_cuda_rng_tracker()
    tracker.states_["model-parallel-rng"] = torch.get_rng_state()
    # Named by the product of routers, whether TransformerEngine is there or not.
    moe_utils.te_general_gemm = None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]


def model_of(args: Any) -> GPTModel:
    """Build the model that a checkpoint's arguments describe."""
    known = {name: getattr(args, name) for name in FIELDS if getattr(args, name, None) is not None}
    experts = getattr(args, "num_experts", None)
    config = TransformerConfig(
        **known,
        num_moe_experts=experts,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        moe_token_dispatcher_type="allgather",
        moe_aux_loss_coeff=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm
    )
    return GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=getattr(args, "rope_scaling_factor", 8.0),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )


def main(source: Path, checkpoint: Path) -> dict[str, Any]:
    """Load and compare."""
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        use_the_cpu()
        path = str(checkpoint / "release")
        common = dist_checkpointing.load_common_state_dict(path)
        model = model_of(common["args"])
        metadata = dist_checkpointing.load_content_metadata(path)
        state = {"model": model.sharded_state_dict(metadata=metadata)}
        model.load_state_dict(dist_checkpointing.load(state, path)["model"])
        model.eval()
        reference = torch.load(source / "reference.pt")
        ids = reference["ids"]
        positions = torch.arange(ids.shape[1]).unsqueeze(0).expand_as(ids)
        mask = torch.ones(1, 1, ids.shape[1], ids.shape[1]).triu(1).bool()
        with torch.no_grad():
            logits = model(ids, positions, mask)
        expected = reference["logits"]
        torch.distributed.destroy_process_group()
    ours = sorted(name for name in sys.modules if name.startswith("mindspeed"))
    difference = float((logits[..., : expected.shape[-1]] - expected).abs().max() / expected.abs().max())
    return {"difference": difference, "ours": ours}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
