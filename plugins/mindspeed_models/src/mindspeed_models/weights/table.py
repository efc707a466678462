"""The weight table: rows that say how tensors of megatron-core are made of tensors of Hugging Face files.

Every transform joins whole ranges of rows of its sources, in some order. So one method, `segments`, serves
the conversion, its inverse, a rank's share and a chunk of a stream: both ways are permutations of rows, bit
for bit. Nothing here knows of tensor, pipeline or expert parallelism. Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mindspeed_core.errors import DataError

if TYPE_CHECKING:
    import torch

    from mindspeed_models.model_plan import ModelPlan


@dataclass(frozen=True)
class Segment:
    """A range of rows of one source; segments in order are the rows of the target.

    Attributes:
        source: index of the source tensor.
        start: its first row.
        stop: the row behind its last one.
    """

    source: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.stop - self.start


class Transform(Protocol):
    """An order of rows: the target is the concatenation of segments of its sources along axis 0."""

    def segments(self, rows: int, plan: ModelPlan) -> list[Segment]:
        """Return the segments of a target with that many rows.

        Raises:
            ValueError: no model of this plan has a tensor with so many rows.
        """


@dataclass(frozen=True)
class Copy:
    """The target is the source, for instance ``o_proj``; also Bloom's ``query_key_value``."""

    def segments(self, rows: int, plan: ModelPlan) -> list[Segment]:
        """Return one segment with all rows."""
        return [Segment(0, 0, rows)]


BloomQKV = Copy
"""Bloom's files have query, key and value of each head together, ``[n, 3, d]``, as megatron-core has them."""


@dataclass(frozen=True)
class Cat:
    """Sources of equal size behind each other: ``[gate; up]`` of megatron-core's ``linear_fc1``."""

    count: int = 2

    def segments(self, rows: int, plan: ModelPlan) -> list[Segment]:
        """Return one segment for each source."""
        if rows % self.count:
            raise ValueError(f"{rows} rows are no {self.count} tensors of one size")
        size = rows // self.count
        return [Segment(source, 0, size) for source in range(self.count)]


@dataclass(frozen=True)
class QKV:
    """Query, key and value of each group together: ``q[j*r*d:(j+1)*r*d], k[j*d:..], v[j*d:..]`` for group j.

    Consecutive query heads share a group, whatever the tensor-parallel size is. Serves weights and biases.
    """

    def segments(self, rows: int, plan: ModelPlan) -> list[Segment]:
        """Return three segments for each group."""
        return _grouped(rows, plan, packed=False)


@dataclass(frozen=True)
class WPack:
    """As `QKV`, from one source with the rows ``[q; k; v]`` (Baichuan's ``W_pack``)."""

    def segments(self, rows: int, plan: ModelPlan) -> list[Segment]:
        """Return three segments for each group, all of source 0."""
        return _grouped(rows, plan, packed=True)


def _grouped(rows: int, plan: ModelPlan, *, packed: bool) -> list[Segment]:
    heads, groups, size = plan.heads, plan.groups, plan.head_dim
    if rows != (heads + 2 * groups) * size:
        raise ValueError(f"{rows} rows are not ({heads} heads + 2 x {groups} groups) x {size} channels")
    queries = heads // groups * size
    # Rows at which keys and values begin in a packed source.
    key, value = (heads * size, (heads + groups) * size) if packed else (0, 0)
    found = []
    for group in range(groups):
        a, b = group * queries, group * size
        found.append(Segment(0, a, a + queries))
        found.append(Segment(0 if packed else 1, key + b, key + b + size))
        found.append(Segment(0 if packed else 2, value + b, value + b + size))
    return found


When = Callable[["ModelPlan", int], bool]
"""Condition for a row in the layer (or prediction module) with that index."""


@dataclass(frozen=True)
class Row:
    """One line of a table; ``{l}`` is a decoder layer, ``{e}`` a routed expert, ``{m}`` a prediction module.

    Attributes:
        mc: key in megatron-core's distributed checkpoints, as layers of TransformerEngine have it. ``{e}`` in
            it is no part of the key: the expert is an index of a leading axis.
        hf: names in Hugging Face's files. ``{L}`` is the layer that follows the decoder (``{m}`` further).
        transform: the order of rows.
        when: the layers that have it; None for all.
        also: other keys of the same tensor, as other layer specifications have them.
        repeats: further names in the files with the same content: checked on reading, written on export.
    """

    mc: str
    hf: tuple[str, ...]
    transform: Transform = field(default_factory=Copy)
    when: When | None = None
    also: tuple[str, ...] = ()
    repeats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.hf, str):
            object.__setattr__(self, "hf", (self.hf,))


@dataclass(frozen=True)
class Entry:
    """A row for one layer and expert: everything is spelled out.

    Attributes:
        key: key of the global tensor in megatron-core.
        sources: names in Hugging Face's files.
        transform: the order of rows.
        expert: index on the tensor's leading axis, None where it has none.
        also: other keys of the tensor.
        repeats: further names of the (only) source.
    """

    key: str
    sources: tuple[str, ...]
    transform: Transform
    expert: int | None = None
    also: tuple[str, ...] = ()
    repeats: tuple[str, ...] = ()

    def forward(self, tensors: Sequence[torch.Tensor], plan: ModelPlan) -> torch.Tensor:
        """Make megatron-core's tensor of Hugging Face's; a permutation of rows, in their dtype."""
        import torch

        rows = sum(len(tensor) for tensor in tensors)
        parts = [tensors[s.source][s.start : s.stop] for s in self.segments(rows, plan)]
        return torch.cat(parts) if len(parts) > 1 else parts[0].clone()

    def inverse(self, tensor: torch.Tensor, plan: ModelPlan) -> list[torch.Tensor]:
        """Make Hugging Face's tensors of megatron-core's."""
        segments = self.segments(len(tensor), plan)
        sizes = source_rows(segments)
        found = [tensor.new_empty(sizes[index], *tensor.shape[1:]) for index in range(len(self.sources))]
        at = 0
        for segment in segments:
            found[segment.source][segment.start : segment.stop] = tensor[at : at + segment.rows]
            at += segment.rows
        return found

    def shape(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the shape of megatron-core's tensor (of one expert) for shapes of the sources."""
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def source_shapes(self, shape: Sequence[int], plan: ModelPlan) -> list[tuple[int, ...]]:
        """Return the shapes of the sources for that of megatron-core's tensor."""
        sizes = source_rows(self.segments(shape[0], plan))
        return [(sizes[index], *shape[1:]) for index in range(len(self.sources))]

    def rows(self, start: int, stop: int, total: int, plan: ModelPlan) -> list[Segment]:
        """Return which rows of which sources make the rows ``[start, stop)`` of ``total``."""
        return clip(self.segments(total, plan), start, stop)

    def segments(self, rows: int, plan: ModelPlan) -> list[Segment]:
        """Return the segments of a tensor with that many rows.

        Raises:
            DataError: names the tensors and the sizes that do not fit.
        """
        try:
            return self.transform.segments(rows, plan)
        except ValueError as error:
            raise DataError(f"{', '.join(self.sources)}: {error}; the files are of another model") from error


def source_rows(segments: Iterable[Segment]) -> dict[int, int]:
    """Return the number of rows of each source."""
    sizes: dict[int, int] = {}
    for segment in segments:
        sizes[segment.source] = max(sizes.get(segment.source, 0), segment.stop)
    return sizes


def clip(segments: Iterable[Segment], start: int, stop: int) -> list[Segment]:
    """Return the segments of the rows ``[start, stop)`` of the target."""
    found = []
    at = 0
    for segment in segments:
        low, high = max(start - at, 0), min(stop - at, segment.rows)
        if low < high:
            found.append(Segment(segment.source, segment.start + low, segment.start + high))
        at += segment.rows
    return found


def expand(rows: Iterable[Row], plan: ModelPlan) -> dict[tuple[str, int | None], Entry]:
    """Spell out a table for one model.

    Returns:
        The entries by key and expert, in the order of the layers of the model.
    """
    found: dict[tuple[str, int | None], Entry] = {}
    for row in rows:
        for names in _places(row, plan):
            entry = Entry(
                row.mc.replace(".{e}", "").format(**names),
                tuple(name.format(**names) for name in row.hf),
                row.transform,
                names["e"] if "{e}" in row.mc else None,
                tuple(key.format(**names) for key in row.also),
                tuple(name.format(**names) for name in row.repeats),
            )
            found[entry.key, entry.expert] = entry
    return found


def _places(row: Row, plan: ModelPlan) -> Iterator[Mapping[str, Any]]:
    text = row.mc
    layers: Sequence[int] = range(plan.layers) if "{l}" in text else (0,)
    modules: Sequence[int] = range(plan.prediction_modules) if "{m}" in text else (0,)
    experts: Sequence[int] = range(plan.experts) if "{e}" in text else (0,)
    for layer in layers:
        for module in modules:
            index = module if "{m}" in text else layer
            if row.when is None or row.when(plan, index):
                for expert in experts:
                    yield {"l": layer, "m": module, "e": expert, "L": plan.layers + module}
