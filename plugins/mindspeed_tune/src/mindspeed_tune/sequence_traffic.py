"""Closed forms of attention over split sequences: rings, exchanged heads, both, and fetched keys.

They are those of causal or whole attention in which every rank has equally many positions. Of latent
attention keys and values have as many heads as queries, and widths of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_tune.closed_form import CONTEXT, EXCHANGE, GATHER, SCATTER, Expected, tensor_sizes
from mindspeed_tune.record import RankRecord, Stage

_RING, _HEADS, _HYBRID = "megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo"
_FETCHED = "kvallgather_cp_algo"
_INNER, _OUTER, _ACROSS, _SECOND = "cp.inner", "cp.outer", "cp.across", "cp.second"
_SEND, _RECEIVE = "isend", "irecv"
_KEPT = {None: "none", "half": "keys", "full": "all"}


@dataclass(frozen=True)
class _Attention:
    """One layer's attention on a rank, and how often it runs.

    Attributes:
        rows: positions of this rank, those of all its samples.
        heads: query heads of this tensor-parallel rank.
        key_heads: heads of keys and values.
        key: width of queries and keys.
        value: width of values.
        dtype: of the tensors.
        size: bytes of an element.
        passes: micro-batches times layers.
        wide: gradients of keys and values travel in float32.
        kept: of keys and values for backward: ``none``, ``keys`` or ``all``.
    """

    rows: float
    heads: float
    key_heads: float
    key: float
    value: float
    dtype: str
    size: float
    passes: float
    wide: bool
    kept: str

    @property
    def both(self) -> float:
        """Return the width of a key and its value."""
        return self.key + self.value

    @property
    def gradients(self) -> tuple[str, float]:
        """Return the dtype in which gradients of keys and values travel, and the bytes of an element."""
        return ("float32", 4) if self.wide else (self.dtype, self.size)

    def summed(self, calls: list[tuple[str, str, str, float, float]], form: str) -> Iterator[Expected]:
        """Add up calls of one layer, ``(group, operation, dtype, calls, bytes)``, over all passes."""
        found: dict[tuple[str, str, str], tuple[float, float]] = {}
        for group, operation, dtype, count, size in calls:
            before = found.get((group, operation, dtype), (0.0, 0.0))
            found[group, operation, dtype] = (before[0] + count, before[1] + size)
        for key, (count, size) in found.items():
            yield Expected(*key, count * self.passes, size * self.passes, form)


def split_sequences(record: RankRecord, stage: Stage) -> Iterator[Expected]:
    """Yield the closed forms of context parallelism on a rank, those that hold for its flags."""
    layout, flags = record.layout, record.flags
    unlike = ("recompute_granularity", "reset_attention_mask")
    if layout.cp == 1 or any(flags.get(name) for name in unlike) or stage.predictions:
        return
    algorithm, size = flags.get("context_parallel_algo"), layout.cp
    if algorithm == _FETCHED:
        yield from _fetched_keys(record, _attention(record, stage))
        return
    equal = record.sizes["seq_length"] % (2 * size) == 0
    if not equal or flags.get("cp_layout", "auto") not in ("auto", "zigzag", "contiguous"):
        return
    if flags.get("context_parallel_kv_cache_policy") and record.sizes.get("context_parallel_cache_interval"):
        return  # layers differ in what they keep
    attention = _attention(record, stage)
    inner = int(flags.get("ulysses_degree_in_cp") or 1) if algorithm == _HYBRID else size
    if algorithm in (_HEADS, _HYBRID):
        shared = max(attention.key_heads, inner)
        if attention.heads % inner or shared % inner or shared % attention.key_heads:
            return
        whole = algorithm == _HEADS
        yield from _exchanged_heads(attention, CONTEXT if whole else _INNER, inner, shared, flags, whole)
        if not whole:
            of_heads = _changed(attention, rows=attention.rows * inner, key_heads=shared / inner)
            yield from _ring(record, of_heads, _OUTER, size // inner, inner)
    elif algorithm == _RING:
        yield from _ring(record, attention, CONTEXT, size, 1)


def _attention(record: RankRecord, stage: Stage) -> _Attention:
    sizes, flags = record.sizes, record.flags
    rows, _, dtype, size = tensor_sizes(record)
    tp = record.layout.tp
    return _Attention(
        rows=rows,
        heads=sizes["num_attention_heads"] / tp,
        key_heads=max(1.0, sizes.get("key_heads", sizes["num_attention_heads"]) / tp),
        key=sizes["key_channels"],
        value=sizes["value_channels"],
        dtype=dtype,
        size=size,
        passes=record.microbatches * sum(stage.layers.values()),
        wide=flags.get("cp_grad_comm_dtype") == "fp32",
        kept=_KEPT[flags.get("context_parallel_kv_cache_policy")],
    )


def _changed(attention: _Attention, **changes: float) -> _Attention:
    return _Attention(**{**vars(attention), **changes})


def _ring(
    record: RankRecord, attention: _Attention, group: str, ranks: int, inner: int
) -> Iterator[Expected]:
    """Yield the messages round a ring of ``ranks``, whose neighbours are ``inner`` ranks apart."""
    window = int(record.sizes.get("cp_window_size") or 1)
    across = ranks // window - 1 if window > 1 else 0
    second = bool(record.flags.get("use_cp_send_recv_overlap")) and ranks % 2 == 0
    if ranks == 1 or (second and across):
        return
    elements = attention.rows * attention.key_heads
    block = elements * attention.both * attention.size
    again = {
        "none": (ranks - 1, (ranks - 1) * block),
        "keys": (ranks - 1, (ranks - 1) * elements * attention.value * attention.size),
        "all": (0, 0.0),
    }[attention.kept]
    dtype, size = attention.gradients
    sums = (ranks - 1) * elements * attention.both * size
    place = record.layout.place(record.rank)["cp"] // inner
    calls: list[tuple[str, str, str, float, float]] = []
    for operation, odd in ((_SEND, place % 2), (_RECEIVE, (place + 1) % 2)):
        # The sender's place chooses between two groups.
        here = _SECOND if second and odd else group
        calls += [
            (here, operation, attention.dtype, ranks - 1 - across, (ranks - 1 - across) * block),
            (_ACROSS, operation, attention.dtype, across, across * block),
            (here, operation, attention.dtype, *again),
            (here, operation, dtype, ranks - 1, sums),
        ]
    form = "m L (R - 1) blocks of keys and values forward, what is not kept of them backward, and gradients"
    yield from attention.summed(calls, form)


def _exchanged_heads(
    attention: _Attention, group: str, ranks: int, shared: float, flags: Any, whole: bool
) -> Iterator[Expected]:
    """Yield the exchange of heads for positions, and back.

    Args:
        attention: of a rank before the exchange.
        group: of the ranks that exchange.
        ranks: how many.
        shared: key heads that are sent, those that several ranks need once for each.
        flags: of the record.
        whole: keys and values are not sent round a ring afterwards.
    """
    rows, size = attention.rows, attention.size
    own = rows * attention.heads * attention.both * size
    parts = {"none": 0.0, "keys": attention.key, "all": attention.both}[attention.kept if whole else "none"]
    times = {"none": 0, "keys": 1, "all": 2}[attention.kept if whole else "none"]
    if flags.get("use_ulysses_allgather_kv"):
        dtype, wide = attention.gradients
        mine = rows * attention.key_heads
        calls = [
            (group, EXCHANGE, attention.dtype, 4.0, 2 * own),
            (group, GATHER, attention.dtype, 2.0 + times, mine * (attention.both + parts) * size),
            (group, SCATTER, dtype, 2.0, ranks * mine * attention.both * wide),
        ]
        yield from attention.summed(calls, "m L queries and outputs, keys and values gathered")
        return
    keys = rows * shared * size
    calls = [
        (group, EXCHANGE, attention.dtype, 8.0 + times, 2 * (own + keys * attention.both) + keys * parts)
    ]
    form = "2 m L tensors of queries, keys, values and outputs"
    yield from attention.summed(calls, form + ", m L of what is exchanged again" if times else form)


def _fetched_keys(record: RankRecord, attention: _Attention) -> Iterator[Expected]:
    """Yield the exchange of keys and values, and of their gradients, among ranks with two chunks each."""
    layout, sizes, flags = record.layout, record.sizes, record.flags
    if (flags.get("sparse_mode") or 0) not in (0, 2):
        return
    if flags.get("attention_mask_type", "causal") != "causal" or flags.get("cp_fetch_head_groups", 1) > 1:
        return
    if flags.get("cp_layout", "auto") not in ("auto", "zigzag") or flags.get("cp_chunks_per_rank"):
        return
    length, place = int(sizes["seq_length"]), layout.place(record.rank)["cp"]
    banded = (flags.get("use_flash_attn") or flags.get("use_fusion_attn_v2")) and not flags.get("sparse_mode")
    window = int(sizes.get("pre_tockens", length)) if banded else length
    owned = [_chunks(length, layout.cp, rank) for rank in range(layout.cp)]
    sent = sum(_fetched(queries, owned[place], window) for queries in owned)
    received = sum(_fetched(owned[place], keys, window) for keys in owned)
    row = sizes["micro_batch_size"] * attention.key_heads * attention.both
    dtype, wide = attention.gradients
    calls = [
        (CONTEXT, EXCHANGE, attention.dtype, 2.0, 2 * sent * row * attention.size),
        (CONTEXT, EXCHANGE, dtype, 1.0, received * row * wide),
    ]
    form = "2 m L fetches of the keys and values that others see of this rank's, m L exchanges of gradients"
    yield from attention.summed(calls, form)


def _chunks(length: int, ranks: int, rank: int) -> tuple[tuple[int, int], ...]:
    """Return the positions of a rank of context parallelism: a chunk from either end."""
    step = length // (2 * ranks)
    return tuple((chunk * step, (chunk + 1) * step) for chunk in (rank, 2 * ranks - 1 - rank))


def _fetched(queries: tuple[tuple[int, int], ...], keys: tuple[tuple[int, int], ...], window: int) -> int:
    """Return how many of the keys some of the queries see, causally and within a window."""
    seen = [(max(0, start - window), end) for start, end in queries]
    if seen[0][1] > seen[1][0]:
        seen = [(min(seen[0][0], seen[1][0]), seen[1][1])]
    return sum(max(0, min(high, end) - max(low, start)) for low, high in seen for start, end in keys)
