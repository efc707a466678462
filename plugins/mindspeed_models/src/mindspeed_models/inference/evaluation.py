"""A run's model in evaluation mode for a while: complete weights, nothing dropped, everything given back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from mindspeed_core.errors import UserError
from mindspeed_models.inference.plain_linears import plain_linears
from mindspeed_models.inference.rotated_keys import rotated_keys

if TYPE_CHECKING:
    from mindspeed_core.run import Run


@contextmanager
def evaluating(run: Run) -> Iterator[None]:
    """Let a run's model compute as in a generation until the block ends. Collective.

    Weights are as the last step left them, experts drop no token, and every module returns to the mode in
    which it was.

    Raises:
        UserError: the model's sequences or weights are shared out over ranks, so that one token cannot be
            computed.
    """
    config = run.config
    if getattr(config, "sequence_parallel", False):
        raise UserError(
            "--sequence-parallel: a step of decoding has one token, which ranks cannot share; train without "
            "it, or load the checkpoint for the generation"
        )
    if getattr(config, "context_parallel_size", 1) > 1:
        raise UserError(
            f"--context-parallel-size {config.context_parallel_size}: sequences are split where batches of "
            "training are read; train with 1, or load the checkpoint for the generation"
        )
    for flag in ("--use-megatron-fsdp", "--use-torch-fsdp2"):
        if getattr(run.args, flag[2:].replace("-", "_"), False):
            raise UserError(
                f"{flag}: between steps each rank holds a shard of the weights; load the checkpoint for the "
                "generation"
            )
    for feature in run.session.plan.features:
        instead = run.session.registry.features[feature.name].cls.mode_fallback
        if instead is not None:
            asked = feature.why if feature.why.startswith("--") else feature.name
            raise UserError(
                f"{asked}: {instead.reason}; train without it, or load the checkpoint for the generation"
            )
    if run.optimizer is not None:
        run.complete_parameters()
    modes = [(module, module.training) for chunk in run.model for module in chunk.modules()]
    capacity = getattr(config, "moe_expert_capacity_factor", None)
    kept = ExitStack()
    try:
        for chunk in run.model:
            chunk.eval()
        if capacity is not None:
            # What is dropped would depend on the other texts of a batch.
            config.moe_expert_capacity_factor = None
        for chunk in run.model:
            kept.enter_context(rotated_keys(chunk))
            kept.enter_context(plain_linears(chunk))
        yield
    finally:
        kept.close()
        for module, mode in modes:
            module.training = mode
        if capacity is not None:
            config.moe_expert_capacity_factor = capacity
