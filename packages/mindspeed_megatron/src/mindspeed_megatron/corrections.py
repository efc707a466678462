"""Faults of megatron-core that are corrected here, each with the versions that have it.

A fault is known by the source of a function: the digests are those of sources that were read and found
faulty. A recorded megatron-core whose source is another fails a test, which asks for a look: either the range
ends there, and the correction with it, or the digest joins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from mindspeed_core.discovery.installed import installed_version


@dataclass(frozen=True)
class Correction:
    """One fault.

    Attributes:
        function: the function or class that has it, ``module:Qual.name``.
        versions: of megatron-core that have it, PEP 440.
        fault: what is wrong, one sentence.
        module: the module of ours that corrects it.
        digests: of the faulty sources, as in the records of touch points.
    """

    function: str
    versions: str
    fault: str
    module: str
    digests: tuple[str, ...]


CORRECTIONS: Mapping[str, Correction] = {
    "residual-dtype": Correction(
        "megatron.core.fusions.fused_bias_dropout:_bias_dropout_add_func",
        "<0.17",
        "It converts the residual to the dtype of what is added, so that nothing of "
        "--fp32-residual-connection is left after the first sum.",
        "mindspeed_megatron.layers",
        ("757cd47e223f",),
    ),
    "norm-under-sequence-parallelism": Correction(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        ">=0.15",
        "It refuses sequence parallelism and zero-centred weights.",
        "mindspeed_megatron.plain_norm",
        ("b807511b29eb", "665ece5ec974"),
    ),
    "width-of-values": Correction(
        "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        ">=0.15",
        "It knows one width for keys and values, and latent attention has two.",
        "mindspeed_megatron.latent_attention",
        ("5a09832350d2", "dc41f4f402fb"),
    ),
    "norm-without-query-rank": Correction(
        "megatron.core.transformer.mla_qk_norm_config:QKNormConfigResolver._resolve_mla_qk_layernorm",
        ">=0.19",
        "It refuses --qk-layernorm without --q-lora-rank, which the local layers of megatron-core ask for.",
        "mindspeed_megatron.latent_attention",
        ("e090baf0edd0",),
    ),
    "drops-by-position": Correction(
        "megatron.core.transformer.moe.moe_utils:apply_router_token_dropping",
        ">=0.15",
        "Experts keep the first tokens by a sort that is not stable.",
        "mindspeed_megatron.drop_policy",
        ("3e913ae04ce8", "f76a59c1642d"),
    ),
    "norm-of-whole-experts": Correction(
        "megatron.core.tensor_parallel.layers:param_is_not_tensor_parallel_duplicate",
        "<0.19",
        "The norm of gradients counts the biases of uncut experts on one tensor-parallel rank alone.",
        "mindspeed_megatron.experts",
        ("c3f073c447b1", "372967461cdd"),
    ),
    "router-bias": Correction(
        "megatron.core.transformer.moe.router:Router.reset_parameters",
        "<0.16",
        "It leaves the bias of a router as the memory was.",
        "mindspeed_megatron.router_bias",
        ("e4b674e9d3b2",),
    ),
    "sharded-gradients": Correction(
        "megatron.core.distributed.torch_fully_sharded_data_parallel:"
        "TorchFullyShardedDataParallel.finish_grad_sync",
        "<0.19",
        "It does not take the argument that megatron-core passes.",
        "mindspeed_megatron.fully_sharded.torch_fsdp2",
        ("2c5e95833e99",),
    ),
    "counting-dataset": Correction(
        "megatron.core.datasets.gpt_dataset:MockGPTLowLevelDataset.__init__",
        "<0.16",
        "Its sequences count to 4,096 whatever the vocabulary is.",
        "mindspeed_train.data.stages",
        ("39e76ce587c1",),
    ),
}
"""Corrections by name."""


@lru_cache(maxsize=64)
def holds(name: str) -> bool:
    """Return whether the installed megatron-core has the fault of a correction."""
    from packaging.specifiers import SpecifierSet

    found = installed_version("megatron-core")
    return not found or SpecifierSet(CORRECTIONS[name].versions).contains(found, prereleases=True)
