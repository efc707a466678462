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
    Slot("attention-mask", "who makes the attention mask and in which form"),
    Slot("data-source", "where samples come from, in place of the host's dataset files"),
    Slot("norm", "the normalization modules of layers and of the final norm", roles=NORM_ROLES),
    Slot("activation", "the activation inside dense feed-forward layers", roles=("activation",)),
    Slot("mlp", "the dense feed-forward module", roles=("mlp",)),
    Slot("mlp-forward", "the forward pass of the feed-forward module, its recomputation included"),
    Slot("rotary", "how rotary position embeddings are computed and applied"),
    Slot("position-embedding", "the kind of position information"),
    Slot("embedding", "the word embedding module"),
    Slot("lm-loss", "how logits become per-token losses"),
    Slot("router", "which experts a token goes to", roles=("router",)),
    Slot("token-dispatcher", "how tokens travel to experts and back"),
    Slot("experts", "the module that computes a rank's experts", roles=("experts",)),
    Slot("shared-experts", "the module of the experts every token visits", roles=("shared_experts",)),
    Slot("expert-map", "which rank holds which expert"),
    Slot("layer-schedule", "the order of phases inside one transformer layer"),
    Slot("context-parallel", "how a sequence is split over context-parallel ranks"),
    Slot("tp-executor", "who executes tensor-parallel matrix products and their communication"),
    Slot("tp-layout", "how tensor-parallel weights are cut"),
    Slot("tp-partition", "how dimensions that do not divide are distributed"),
    Slot("pipeline-schedule", "the order of forward and backward passes over pipeline stages"),
    Slot("layer-partition", "which layers a pipeline stage holds"),
    Slot("pp-transport", "how tensors cross from one pipeline stage to the next"),
    Slot("optimizer", "the optimizer's update rule"),
    Slot("optimizer-state", "where and in which form the optimizer keeps its moments"),
    Slot("optimizer-master", "where and in which form the master weights live"),
    Slot("optimizer-grad", "where and in which form main gradients live"),
    Slot("saved-tensors", "who owns the activations autograd keeps for the backward pass"),
    Slot("recompute-policy", "which activations are computed again"),
    Slot("recompute-count", "how many layers of each pipeline stage are computed again"),
    Slot("allocator", "how device memory is handed out"),
    Slot("dw-queue", "who delays the gradients of weights"),
)


def claimed_roles(feature: type[Feature], slots: Mapping[str, Slot]) -> frozenset[str]:
    """Return the roles whose modules a feature replaces: those of its slots, and those that it names."""
    named = (slots[slot].roles for slot in feature.slots if slot in slots and slots[slot].exclusive)
    return frozenset(feature.replaces_roles).union(*named)


def roles_meet(one: str, other: str) -> bool:
    """Return whether two roles may mean one module, as ``fc1`` and ``mlp.fc1`` may."""
    return all(a == b for a, b in zip(reversed(one.split(".")), reversed(other.split("."))))
