"""The declaration of the optimizer that other features of this package are options of."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Proofs, Requirement, hookimpl

_WHERE = "state lies where the block-wise AdamW does not find it"


class BlockOptimizer(Feature):
    """Puts the block-wise AdamW in place once, for every feature that is an option of it."""

    name = "block-optimizer"
    family = "memory"
    summary = "Update parameters in windows for features that move optimizer state"
    requires = (
        Requirement(flag="--optimizer", one_of=("adam", "fused_adam"), reason="the update is AdamW's"),
    )
    conflicts = (
        Conflict(flag="--use-precision-aware-optimizer", reason=_WHERE),
        Conflict(flag="--optimizer-cpu-offload", reason=_WHERE),
        Conflict(
            flag="--use-megatron-fsdp", reason="it keeps main parameters and gradients in buffers of its own"
        ),
        Conflict(flag="--use-torch-fsdp2", reason="it keeps gradients and parameters as parts of its own"),
        Conflict(flag="--fp8-param-gather", reason="weights of 8 bits are no half of their main parameters"),
        Conflict(
            flag="--log-params-norm",
            reason="the norm is taken of float32 copies of parameters, which there are none of then",
        ),
        Conflict(
            feature="moe-expert-placement",
            reason="experts that move take main parameters and moments along as megatron-core keeps them",
        ),
    )
    docs = "mindspeed_memory:docs/block-optimizer.md"
    modes = ("train",)
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_memory.features.optimizer_proofs:BLOCK_PROOFS")

    @hookimpl(wrapper=True)
    def build_optimizer_config(self) -> Generator[None, Any, Any]:
        """Let megatron-core make no float32 copies of 16-bit parameters, where it can do without."""
        config = yield
        from mindspeed_megatron.main_parameters import wants_main_parameters

        wants_main_parameters(config)
        return config

    @hookimpl(wrapper=True)
    def build_optimizer(self, session: Any, args: Any, pg: Any) -> Generator[None, Any, Any]:
        """Put the optimizer that all active options describe in place."""
        optimizer = yield
        from mindspeed_memory.optim.install import install
        from mindspeed_memory.optim.options import block_options

        install(session, optimizer, block_options(args, session.plan.names), pg, self.name)
        return optimizer

    @hookimpl(wrapper=True)
    def train_step(self, session: Any) -> Generator[None, Any, Any]:
        """Let a first step need what every other one needs, and free what the last one left to be copied."""
        from mindspeed_memory.optim.install import InnerOptimizers

        for inner in session.state(InnerOptimizers).optimizers:
            inner.settle()
            inner.allocate()
        return (yield)


IN_BLOCKS = Requirement(
    feature=BlockOptimizer.name, reason="it is an option of the block-wise AdamW", implies=True
)
"""Of features that are options of it."""
