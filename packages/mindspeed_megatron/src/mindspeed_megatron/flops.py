"""Floating-point operations of a sequence: the formula behind every TFLOP/s figure.

Only matrix products count, a product of ``[m, k]`` and ``[k, n]`` as ``2 m k n``. With sequence length ``s``,
hidden size ``h``, query heads ``a``, key-value groups ``g``, head width ``d``, MLP width ``f`` and vocabulary
``v``, the forward pass of one sequence costs:

- attention projections: ``2 s h (a d + 2 g d) + 2 s a d h``; an output gate adds ``2 s h a d``
- attention scores: ``2 p a d`` for the scores and as much for the values, with ``p = s^2 / 2`` pairs of
  positions under a causal mask and ``w s - w^2 / 2`` when a query sees ``w < s`` positions
- multi-latent attention: the down- and up-projections with ``q_lora_rank`` and ``kv_lora_rank`` instead of
  the projections above, and heads of width ``qk_head_dim + qk_pos_emb_head_dim`` (scores) and
  ``v_head_dim`` (values)
- MLP: ``4 s h f``, with a gate (SwiGLU) ``6 s h f``
- mixture of experts: the router ``2 s h E``, the MLP of each of the ``topk`` experts a token visits and of
  the shared expert; experts in a latent width add the projections into it and out of it
- multi-token prediction: per depth one layer more, ``4 s h^2`` for joining the states, and the logits again
- logits: ``2 s h v``, with the padded vocabulary

Backward costs twice forward: as much for the gradient of a product's input as for that of its weight. Where
weights are frozen (`partial_training.PartialTraining`), their gradients are left out, and matrices that
train beside them are counted like any other. That is the *model* count: it does not depend on how the model
is run. The *hardware* count adds the parts whose forward pass is run again by activation recompute. Kernels
that compute the masked half of the scores as well (megatron-core's own attention does) execute more than
either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_megatron.partial_training import PartialTraining, TrainedParts

if TYPE_CHECKING:
    from mindspeed_core.run import Run

_SCORES = "attention scores"
_EXPERTS = ("router", "experts", "shared experts")


@dataclass(frozen=True)
class FlopCount:
    """Operations of one sequence.

    Attributes:
        forward: operations of the forward pass by part of the model.
        recomputed: operations of the forward pass that are run again in backward.
        frozen: operations of backward that frozen weights leave out: their own gradients.
    """

    forward: Mapping[str, float]
    recomputed: float
    frozen: float = 0.0

    @property
    def model(self) -> float:
        """Return forward and backward, without recompute."""
        return 3.0 * sum(self.forward.values()) - self.frozen

    @property
    def hardware(self) -> float:
        """Return forward and backward with what is recomputed."""
        return self.model + self.recomputed


def uncounted(config: Any) -> str:
    """Return why the formula does not cover a model; empty when it does."""
    if getattr(config, "is_hybrid_model", False):
        return "hybrid models are not counted"
    if getattr(config, "experimental_attention_variant", None):
        return f"attention {config.experimental_attention_variant} is not counted"
    if getattr(config, "heterogeneous_block_specs", False):
        return "layers of different shapes are not counted"
    return ""


def count_flops(
    config: Any,
    *,
    seq_length: int,
    vocab_size: int,
    causal: bool = True,
    partial: PartialTraining | None = None,
) -> FlopCount:
    """Count the operations of one sequence through a GPT.

    Args:
        config: megatron-core's ``TransformerConfig`` (or a record with its fields).
        seq_length: tokens of the sequence, before any sharding.
        vocab_size: rows of the output layer, padding included.
        causal: count what the mask leaves; False counts every pair of positions.
        partial: what trains, where some weights are frozen; None where everything does.
    """
    plain = [
        layer_forward(config, seq_length, routed=routed, windowed=windowed, causal=causal)
        for routed, windowed in zip(_routed(config), _windowed(config))
    ]
    depth = getattr(config, "mtp_num_layers", None) or 0
    joining = 4.0 * seq_length * config.hidden_size**2
    once = {"logits": 2.0 * seq_length * config.hidden_size * vocab_size * (1 + depth)}
    if depth:
        once["multi-token prediction"] = depth * joining
    layers, added = plain, {}
    if partial is not None:
        added = {part: 2.0 * seq_length * elements for part, elements in partial.added.items()}
        layers = [{part: work + added.get(part, 0.0) for part, work in layer.items()} for layer in plain]
    predictions = [layers[-1]] * depth
    forward = _summed([*layers, *predictions, once])
    forward["logits"] += added.get("logits", 0.0) * (1 + depth)
    recomputed = _recomputed(config, layers, predictions, joining, seq_length)
    if partial is None:
        return FlopCount(forward, recomputed)
    own = _summed([*plain, *[plain[-1]] * depth, once])
    trained = {_SCORES, *partial.trained}
    frozen = sum(work for part, work in own.items() if part not in trained)
    return FlopCount(forward, recomputed, frozen)


def count_run(run: Run, seq_length: int, vocab_size: int | None = None, *, causal: bool = True) -> FlopCount:
    """Count the operations of one sequence of a run, frozen weights left out.

    Args:
        run: whose model is counted.
        seq_length: tokens of the sequence, before any sharding.
        vocab_size: rows of the output layer; by default those of the arguments.
        causal: see `count_flops`.
    """
    rows: Any = run.args.padded_vocab_size if vocab_size is None else vocab_size
    partial = run.session.state(TrainedParts).partial
    return count_flops(run.config, seq_length=seq_length, vocab_size=rows, causal=causal, partial=partial)


def _summed(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up the operations of several tables by part."""
    total: dict[str, float] = {}
    for table in tables:
        for part, operations in table.items():
            total[part] = total.get(part, 0.0) + operations
    return total


def layer_forward(config: Any, s: int, *, routed: bool, windowed: bool, causal: bool) -> dict[str, float]:
    """Count the forward operations of one transformer layer by part; see `count_flops`.

    A ``routed`` layer has experts, a ``windowed`` one a sliding window over its ``s`` positions.
    """
    pairs = _pairs(config, s, windowed) if causal else float(s * s)
    parts = _latent_attention(config, s, pairs) if _is_latent(config) else _attention(config, s, pairs)
    h = config.hidden_size
    per_width = (6.0 if config.gated_linear_unit else 4.0) * s
    if not routed:
        parts["mlp"] = per_width * h * config.ffn_hidden_size
        return parts
    parts["router"] = 2.0 * s * h * config.num_moe_experts
    latent = getattr(config, "moe_latent_size", None)
    width = config.moe_ffn_hidden_size or config.ffn_hidden_size
    parts["experts"] = per_width * (latent or h) * width * config.moe_router_topk
    if latent:
        parts["experts"] += 4.0 * s * h * latent
    if config.moe_shared_expert_intermediate_size:
        parts["shared experts"] = per_width * h * config.moe_shared_expert_intermediate_size
    return parts


def _attention(config: Any, s: int, pairs: float) -> dict[str, float]:
    h, d = config.hidden_size, config.kv_channels
    queries = d * config.num_attention_heads
    groups = d * (config.num_query_groups or config.num_attention_heads)
    gate = queries if getattr(config, "attention_output_gate", False) else 0
    return {
        "attention projections": 2.0 * s * h * (queries + 2 * groups + gate) + 2.0 * s * queries * h,
        _SCORES: 4.0 * pairs * queries,
    }


def _latent_attention(config: Any, s: int, pairs: float) -> dict[str, float]:
    h, heads = config.hidden_size, config.num_attention_heads
    score_width = config.qk_head_dim + config.qk_pos_emb_head_dim
    if config.q_lora_rank is None:
        queries = h * heads * score_width
    else:
        queries = config.q_lora_rank * (h + heads * score_width)
    keys_values = h * (config.kv_lora_rank + config.qk_pos_emb_head_dim)
    keys_values += config.kv_lora_rank * heads * (config.qk_head_dim + config.v_head_dim)
    output = heads * config.v_head_dim * h
    return {
        "attention projections": 2.0 * s * (queries + keys_values + output),
        _SCORES: 2.0 * pairs * heads * (score_width + config.v_head_dim),
    }


def _pairs(config: Any, s: int, windowed: bool) -> float:
    window = getattr(config, "window_size", None)
    if not windowed or window is None or window[0] < 0:
        return s * s / 2.0
    width = min(window[0] + 1, s)
    return width * s - width * width / 2.0


def _is_latent(config: Any) -> bool:
    return bool(getattr(config, "multi_latent_attention", False))


def _routed(config: Any) -> list[bool]:
    if not config.num_moe_experts:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(config.num_layers)]
    return [bool(routed) for routed in frequency]


def _windowed(config: Any) -> list[bool]:
    skip = getattr(config, "window_attn_skip_freq", None)
    if isinstance(skip, Sequence):
        return [bool(windowed) for windowed in skip]
    if skip:
        return [(layer + 1) % skip != 0 for layer in range(config.num_layers)]
    return [True] * config.num_layers


def _recomputed(
    config: Any,
    layers: Sequence[Mapping[str, float]],
    predictions: Sequence[Mapping[str, float]],
    joining: float,
    s: int,
) -> float:
    if config.recompute_granularity == "full":
        again = len(layers)
        if config.recompute_method == "block":
            stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
            again = min(config.recompute_num_layers * stages, len(layers))
            # megatron-core keeps the activations of its prediction layers then.
            predictions = ()
        total = sum(sum(layer.values()) for layer in layers[:again])
        return total + sum(sum(layer.values()) + joining for layer in predictions)
    if config.recompute_granularity == "selective":
        modules = config.recompute_modules or ["core_attn"]
        return sum(_selected(config, modules, layer, s) for layer in [*layers, *predictions])
    return 0.0


def _selected(config: Any, modules: Sequence[str], layer: Mapping[str, float], s: int) -> float:
    """Count what one layer runs again when only ``modules`` are recomputed; norms cost nothing."""
    parts = {"core_attn": (_SCORES,), "mlp": ("mlp",), "moe": _EXPERTS}
    if "moe" not in modules:
        parts["shared_experts"] = ("shared experts",)
    total = sum(layer.get(part, 0.0) for module in modules for part in parts.get(module, ()))
    if "mla_up_proj" in modules and _is_latent(config) and layer:
        total += _up_projections(config, s)
    return total


def _up_projections(config: Any, s: int) -> float:
    """Count the part of latent attention's projections that lead out of the latent widths."""
    heads = config.num_attention_heads
    ups = config.kv_lora_rank * heads * (config.qk_head_dim + config.v_head_dim)
    if config.q_lora_rank is not None:
        ups += config.q_lora_rank * heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    return 2.0 * s * ups
