"""Names of MindSpeed and AscendSpeed for what megatron-core's own flags switch on: presets of them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import Conflict, Feature, Flag, Gain, Requirement, Scenario, hookimpl
from mindspeed_optim.features.proofs import BF16, PLAIN, SHARDED

if TYPE_CHECKING:
    from argparse import Namespace

    from mindspeed_core.session import Session

_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
"""Strategies of Megatron-FSDP by stage of ZeRO."""
_MANY = 16
"""Micro-batches whose sum in bfloat16 loses more than a rank's own rounding."""


class ZeroStage(Feature):
    """A stage of ZeRO by its number."""

    name = "opt-zero"
    family = "optim"
    summary = "Choose by ZeRO stage what data-parallel ranks shard"
    flags = (
        Flag(
            "--zero-stage",
            type=int,
            choices=(0, 1, 2, 3),
            help="0: nothing, 1: optimizer state, 2: gradients too, 3: parameters too.",
        ),
    )
    modes = ("train",)
    docs = "mindspeed_optim:docs/opt-zero.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = (
        Scenario(
            "stage-1",
            flags=(*PLAIN, "--zero-stage", "1"),
            baseline=(*PLAIN, *SHARDED),
            world_size=2,
            tolerance=0.0,
        ),
        Scenario(
            "stage-3",
            flags=(*PLAIN, "--zero-stage", "3", "--untie-embeddings-and-output-weights"),
            baseline=(*PLAIN, *SHARDED, "--untie-embeddings-and-output-weights"),
            world_size=2,
            tolerance=5e-5,
        ),
    )

    @classmethod
    def enabled(cls, args: Namespace) -> bool:
        """Return whether a stage is given; 0 is one."""
        return getattr(args, "zero_stage", None) is not None

    @classmethod
    def presets(cls, args: Namespace) -> Mapping[str, Any]:
        """Return what a stage stands for."""
        stage = getattr(args, "zero_stage", None)
        if not stage:
            return {}
        if stage == 1:
            return {"use_distributed_optimizer": True}
        if args.use_torch_fsdp2:
            return {"torch_fsdp2_reshard_after_forward": stage == 3}
        return {
            "use_distributed_optimizer": True,
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": _STRATEGIES[stage],
        }

    @classmethod
    def validate(cls, args: Namespace) -> Sequence[str]:
        """Refuse other flags that say something else."""
        stage = args.zero_stage
        said = [
            ("--use-distributed-optimizer", args.use_distributed_optimizer and not stage),
            ("--use-megatron-fsdp", args.use_megatron_fsdp and stage < 2),
            ("--use-torch-fsdp2", args.use_torch_fsdp2 and stage < 2),
        ]
        problems = [
            f"--zero-stage {stage} shards less than {flag}; leave one of the two out"
            for flag, more in said
            if more
        ]
        strategy = args.data_parallel_sharding_strategy
        if stage > 1 and args.use_megatron_fsdp and strategy != _STRATEGIES[stage]:
            problems.append(
                f"--zero-stage {stage} means --data-parallel-sharding-strategy {_STRATEGIES[stage]}, and it "
                f"is {strategy}; leave one of the two out"
            )
        if stage > 1 and args.pipeline_model_parallel_size > 1:
            problems.append(
                f"--zero-stage {stage} with --pipeline-model-parallel-size "
                f"{args.pipeline_model_parallel_size}: gradients would be reduced with every micro-batch; "
                "use --zero-stage 1"
            )
        return problems


class QuantGrads(Feature):
    """Gradient buffers of 16 bits, summed over ranks in float32."""

    name = "opt-quant-grads"
    family = "optim"
    summary = "Keep and send gradients in bfloat16, summed over ranks in float32"
    flags = (Flag("--quant-grads", help="Gradient buffers in bfloat16; ranks sum them in float32."),)
    requires = (
        Requirement(flag="--bf16", reason="a model in float32 has float32 gradients"),
        Requirement(
            flag="--use-distributed-optimizer",
            reason="a sum in float32 is made of shards, which it reduces to",
        ),
    )
    conflicts = (
        Conflict(flag="--accumulate-allreduce-grads-in-fp32", reason="it keeps gradients in float32"),
        Conflict(flag="--use-torch-fsdp2", reason="it keeps gradients of its own"),
        Conflict(flag="--use-megatron-fsdp", reason="it keeps gradients in buffers of its own"),
    )
    modes = ("train",)
    docs = "mindspeed_optim:docs/opt-quant-grads.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = (
        Scenario(
            "dp2",
            flags=(*PLAIN, *BF16, *SHARDED, "--quant-grads"),
            baseline=(*PLAIN, *BF16, *SHARDED),
            world_size=2,
            steps=1,
            tolerance=1e-2,
            compare=("losses", "gradients"),
            gains=(Gain("gradient_bytes", 0.5),),
        ),
        # Sequence parallelism reduces and scatters by the function that gradients are not summed with.
        Scenario(
            "tp2-sp",
            flags=(*PLAIN, *BF16, *SHARDED, *_TP2, "--quant-grads"),
            baseline=(*PLAIN, *BF16, *SHARDED, *_TP2),
            world_size=2,
            steps=1,
            tolerance=1e-2,
            compare=("losses", "gradients"),
        ),
    )

    @hookimpl(wrapper=True)
    def build_ddp_config(self, session: Session) -> Generator[None, Any, Any]:
        """Remember what buckets replace for the whole process."""
        from mindspeed_optim.kept_reduction import keep_reduction

        keep_reduction(session)
        return (yield)

    @classmethod
    def presets(cls, args: Namespace) -> Mapping[str, Any]:
        """Return the two flags that it stands for."""
        if not getattr(args, "quant_grads", False):
            return {}
        return {"grad_reduce_in_bf16": True, "ddp_reduce_scatter_with_fp32_accumulation": True}

    @classmethod
    def notes(cls, args: Namespace) -> Sequence[str]:
        """Say what summing many micro-batches in 16 bits costs."""
        batch, micro = getattr(args, "global_batch_size", None), getattr(args, "micro_batch_size", None)
        ranks = getattr(args, "data_parallel_size", None)
        if not batch or not micro or not ranks or batch // (micro * ranks) <= _MANY:
            return ()
        return (
            f"--quant-grads sums {batch // (micro * ranks)} micro-batches in bfloat16, whose rounding grows "
            "with their number; fewer, larger ones lose less",
        )
