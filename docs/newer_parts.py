"""Parts that megatron-core gained and that are more than configuration fields, each with a verdict."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One part of megatron-core.

    Attributes:
        module: below ``megatron.core``, as a path.
        since: the first recorded version that has it.
        verdict: what becomes of it here.
        fields: fields of configurations that ask for it; each has a verdict of its own.
        flags: flags of Megatron-LM's scripts that ask for it; each has a verdict of its own.
        tests: files that show what the verdict says.
    """

    module: str
    since: str
    verdict: str
    fields: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


_LIBRARY = "packages/mindspeed_megatron/tests/library"
_HOST = "packages/mindspeed_train/tests/host"

PARTS = (
    Part(
        "hyper_comm_grid.py",
        "0.15.3",
        "used in library sessions: groups of a grid go to `session.build_groups` and to the model; hosts "
        "with a loop make theirs with parallel_state",
        tests=(f"{_LIBRARY}/test_groups_of_grids.py",),
    ),
    Part(
        "resharding/refit.py",
        "0.16.0",
        "used in library sessions: weights go between two live models of different layouts; in Megatron-LM "
        "reinforcement learning alone calls it, which is refused",
        flags=("--refit-method", "--rl-use-sequence-packing"),
        tests=(f"{_LIBRARY}/test_groups_of_grids.py",),
    ),
    Part(
        "recompute.py",
        "0.18.0",
        "used: `--recompute-granularity` and `--recompute-method` of blocks of layers arrive there",
        tests=("plugins/mindspeed_memory/tests/test_recompute.py",),
    ),
    Part(
        "optimizer/layer_wise_optimizer.py",
        "0.16.0",
        "not used: `--optimizer muon --use-distributed-optimizer` of mindspeed-optim shards momentum without "
        "the package emerging_optimizers, which this one asks for",
        fields=("use_layer_wise_distributed_optimizer",),
        flags=("--no-use-layer-wise-param-layout",),
        tests=("packages/mindspeed_megatron/tests/megatron_lm_host/test_adapted_optim.py",),
    ),
    Part(
        "optimizer/emerging_optimizers.py",
        "0.18.0",
        "not used: the rules of mindspeed-optim take their place",
        fields=("muon_coefficient_type", "soap_shampoo_beta", "adaptive_muon_beta2", "lion_beta1"),
        tests=(f"{_LIBRARY}/test_update_rules.py",),
    ),
    Part(
        "transformer/moe/token_dispatcher_inference.py",
        "0.17.1",
        "not used: dispatchers of a training are those of experts' features",
        fields=("inference_moe_token_dispatcher_type",),
    ),
    Part(
        "transformer/moe/paged_stash.py",
        "0.18.0",
        "a flag that stands down: pages belong to TransformerEngine's experts",
        fields=("moe_paged_stash", "moe_paged_stash_page_size"),
        tests=(f"{_HOST}/test_newer_fields.py",),
    ),
    Part(
        "distributed/fsdp/src/megatron_fsdp/experimental/fully_shard.py",
        "0.19.0",
        "not used: `--use-megatron-fsdp` is refused from 0.18 on, `--use-torch-fsdp2` shards on every "
        "version",
        fields=("megatron_fsdp_max_pool_double_buffer",),
        tests=("packages/mindspeed_megatron/tests/megatron/test_newer_cores.py",),
    ),
    Part(
        "inference/apis/llm.py",
        "0.18.0",
        "not used: its engine needs CUDA; `mindspeed-models generate` and `serve` answer on every platform",
        fields=("inference_cuda_graph_scope",),
        flags=("--inference-dynamic-batching",),
    ),
    Part(
        "tensor_parallel/gtp_api.py",
        "0.19.0",
        "no flag: groups of its own hold the parts of a weight, which no host here builds",
        fields=("tensor_parallel_num_weight_shards", "gtp_weight_remat_size"),
        tests=(f"{_HOST}/test_newer_fields.py",),
    ),
    Part(
        "models/hybrid/hybrid_model.py",
        "0.18.0",
        "refused: Mamba layers need TransformerEngine's and CUDA packages",
        flags=("--hybrid-layer-pattern",),
    ),
    Part(
        "transformer/cuda_graph_config.py",
        "0.18.0",
        "refused: no host here captures graphs",
        fields=("cuda_graph_impl", "cuda_graph_modules"),
    ),
    Part(
        "transformer/moe/router_replay.py",
        "0.16.0",
        "refused: nothing records routes that could be replayed",
        fields=("moe_enable_routing_replay",),
    ),
    Part(
        "fault_injector.py",
        "0.18.0",
        "not used: errors are not injected",
        flags=("--error-injection-type",),
    ),
)
