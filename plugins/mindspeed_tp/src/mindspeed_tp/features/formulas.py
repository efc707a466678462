"""Closed formulas of the bytes that a rank receives for one layer and micro-batch, forward and backward.

Gathers and scattered sums of a hidden state bring ``(t - 1) / t`` of it, sums on all ranks twice that.
"""

from __future__ import annotations

_TOKENS = "(seq_length * micro_batch_size / context_parallel_size)"
_OTHERS = "(tensor_model_parallel_size - 1) / tensor_model_parallel_size"
_STATE = f"{_OTHERS} * element_size * hidden_size * {_TOKENS}"

DENSE = f"{_STATE} * (10 if sequence_parallel else 8)"
"""Of a dense layer cut in one dimension: four gathers and scatters forward, six backward; or four sums."""

RECOMPUTED = (
    f"{_STATE} * (((11 if recompute_comm_save_gathered else 13) if sequence_parallel else 10) "
    "if optimize_recomp_communication_level == 1 else "
    "((10 if recompute_comm_save_gathered else 12) if sequence_parallel else 8))"
)
"""Of a layer that is computed again without the sums that only its first pass needed."""

UNEVEN = (
    "element_size * hidden_size * micro_batch_size * (tensor_model_parallel_size - 1) * "
    "(10 * ((seq_length + tensor_model_parallel_size - 1) // tensor_model_parallel_size) "
    "if sequence_parallel else 8 * seq_length / tensor_model_parallel_size)"
)
"""Of a layer whose positions travel padded to the largest part."""

_X, _Y = "(tp_x - 1) / tp_x", "(tp_y - 1) / tp_y"
_QUERY = "num_attention_heads * kv_channels"
_KEYS = "(num_query_groups if group_query_attention else num_attention_heads) * kv_channels"
_HIDDEN = f"{_X} * {_TOKENS} * hidden_size / tp_y"
_WIDTH = f"{_Y} * {_TOKENS} / tp_x"
_LINEARS = (
    f"(4 * {_HIDDEN} + {_WIDTH} * (((2 if swiglu else 1) + 1) * ffn_hidden_size "
    f"+ (2 * {_QUERY} + 2 * {_KEYS}) * (1 + 1 / tp_y)))"
)
_AGAIN = f"(2 * {_HIDDEN} + {_WIDTH} * ({_QUERY} + ffn_hidden_size))"
_NORMS = f"{_TOKENS} / tp_x * (tp_y - 1) * 4 * (1 / tp_y if normalization == 'RMSNorm' else 1)"
GRID = f"element_size * (2 * {_LINEARS} + {_AGAIN}) + 4 * 2 * {_NORMS}"
"""Of a layer on a grid: backward mirrors forward and gathers inputs of linears again; norms in float32."""
