"""The exclusive roles of a training run that the core itself names.

Two active features on one exclusive slot exclude each other without anybody listing pairs. A plugin declares
further slots with `Slot` among its declarations; a feature that names a slot nobody declared is refused, so
that a misspelling cannot silently switch the exclusion off. Where filling a slot replaces modules, the slot
names their roles, as `SpecEditor` does.
"""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_core.feature import Feature, Slot

NORM_ROLES = (
    "input_layernorm",
    "pre_mlp_layernorm",
    "pre_cross_attn_layernorm",
    "q_layernorm",
    "k_layernorm",
    "kv_layernorm",
    "final_layernorm",
    "enorm",
    "hnorm",
)
"""Every role that is a normalization."""

CORE_SLOTS: tuple[Slot, ...] = (
    Slot(
        "core-attention",
        "the attention between query, key and value of every layer",
        roles=("core_attention",),
    ),
    Slot("attention-mask", "the attention mask and its form"),
    Slot("data-source", "the source of samples, in place of the host's dataset files"),
    Slot("norm", "the normalization modules of layers and of the final norm", roles=NORM_ROLES),
    Slot("activation", "the activation inside dense feed-forward layers", roles=("activation",)),
    Slot("mlp", "the dense feed-forward module", roles=("mlp",)),
    Slot("mlp-forward", "the forward pass of the feed-forward module, its recomputation included"),
    Slot("rotary", "the computation and application of rotary position embeddings"),
    Slot("position-embedding", "the kind of position information"),
    Slot("embedding", "the word embedding module"),
    Slot("lm-loss", "the loss of each token from its logits"),
    Slot("router", "the choice of experts for a token", roles=("router",)),
    Slot("token-dispatcher", "the dispatch of tokens to experts, and their combination"),
    Slot("experts", "the module that computes a rank's experts", roles=("experts",)),
    Slot("shared-experts", "the module of the experts every token visits", roles=("shared_experts",)),
    Slot("expert-map", "the placement of experts on ranks"),
    Slot("layer-schedule", "the order of phases inside one transformer layer"),
    Slot("context-parallel", "the split of a sequence over context-parallel ranks"),
    Slot("tp-executor", "the executor of tensor-parallel GEMMs and their communication"),
    Slot("tp-layout", "the sharding of tensor-parallel weights"),
    Slot("tp-partition", "the sharding of dimensions that do not divide evenly"),
    Slot("pipeline-schedule", "the order of forward and backward passes over pipeline stages"),
    Slot("layer-partition", "the layers of a pipeline stage"),
    Slot("pp-transport", "the transport of tensors between pipeline stages"),
    Slot("optimizer", "the optimizer's update rule"),
    Slot("optimizer-state", "the place and form of the optimizer's moments"),
    Slot("optimizer-master", "the place and form of master weights"),
    Slot("optimizer-grad", "the place and form of main gradients"),
    Slot("saved-tensors", "the owner of activations saved for backward"),
    Slot("recompute-policy", "the choice of activations to recompute"),
    Slot("recompute-count", "the number of recomputed layers of each pipeline stage"),
    Slot("allocator", "the allocator of device memory"),
    Slot("dw-queue", "the queue of delayed weight gradients"),
)


def claimed_roles(feature: type[Feature], slots: Mapping[str, Slot]) -> frozenset[str]:
    """Return the roles whose modules a feature replaces: those of its slots, and those that it names."""
    named = (slots[slot].roles for slot in feature.slots if slot in slots and slots[slot].exclusive)
    return frozenset(feature.replaces_roles).union(*named)


def roles_meet(one: str, other: str) -> bool:
    """Return whether two roles may mean one module, as ``fc1`` and ``mlp.fc1`` may."""
    return all(a == b for a, b in zip(reversed(one.split(".")), reversed(other.split("."))))
