"""The sections of a GPU run: name, module, time budget and what each shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """One part of a run, in a process of its own.

    Attributes:
        name: as ``--section`` takes it; also the name of its JSON file.
        module: the module in this folder whose ``measure(report)`` runs it.
        seconds: time budget.
        shows: one sentence.
        divides: its checks can be divided among processes that share the device.
    """

    name: str
    module: str
    seconds: int
    shows: str
    divides: bool = False


SECTIONS = (
    Section(
        "platform",
        "cuda_platform",
        120,
        "device, streams, events, pinned buffers, random state, memory figures, allocator settings, "
        "deterministic algorithms; sessions leave torch as it was",
    ),
    Section(
        "attention",
        "attention_errors",
        210,
        "errors of fused attention and of context parallelism's block kernels, forward and gradients, "
        "against float64, and which kernel computed them",
    ),
    Section(
        "training",
        "training_speed",
        390,
        "bf16 training of a GPT with 1.1 billion parameters by megatron-core's own loop and by the host, "
        "without and with features: step time, tokens/s, MFU, peak memory",
    ),
    Section(
        "plan",
        "planned_memory",
        120,
        "the planned peak of that GPT, without and with features, against the allocator's: at most 5 % off",
    ),
    Section(
        "kernels",
        "operator_speed",
        210,
        "every operator's backends against their references, and their time against the composition, "
        "torch.compile, Liger-Kernel and FlashAttention",
    ),
    Section(
        "experts",
        "expert_layer",
        90,
        "a layer of 64 experts in bf16: grouped products against one product per expert and MegaBlocks",
    ),
    Section(
        "features",
        "feature_proofs",
        240,
        "every proof of the features of this repository's plugins that fits the GPUs at hand: losses, "
        "gradients and parameters with and without the feature",
        divides=True,
    ),
    Section(
        "nccl",
        "several_gpus",
        120,
        "two GPUs and more: every kind of parallelism trains as one process does, and the step with each "
        "family's overlap of communication against the step without",
    ),
)
"""In the order in which they run; the budgets add up to 25 minutes."""
