"""The file of ``--coc-config``: numbers of parts by the shape of a product. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_tp.plan import Shape

FLAG = "--coc-config"
ALLOWED_PARTS = (1, 2, 4, 8)
_SHAPE = re.compile(r"\[\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\]")


class CoCConfigError(ValueError):
    """The file cannot be used; the message says which entry, and why."""


def shapes_of(path: str | None) -> tuple[tuple[Shape, int], ...]:
    """Read ``{"[m, k, n]": parts}``: rows of all ranks, summed width, width of the result.

    Args:
        path: the JSON file; None for no file.

    Raises:
        CoCConfigError: the file cannot be read or has an entry that is none.
    """
    from pathlib import Path

    if path is None:
        return ()
    try:
        return _shapes_in(Path(path).read_text(encoding="utf-8"))
    except CoCConfigError:
        raise
    except (OSError, ValueError) as error:
        raise CoCConfigError(f"cannot be read ({error}); give a JSON file like {{'[m, k, n]': 4}}") from error


@lru_cache(maxsize=8)
def _shapes_in(text: str) -> tuple[tuple[Shape, int], ...]:
    import json

    table = json.loads(text)
    if not isinstance(table, Mapping):
        raise CoCConfigError("holds no object; write shapes and numbers of parts, {'[m, k, n]': 4}")
    return tuple(_entries(table))


def _entries(table: Mapping[str, Any]) -> Iterator[tuple[Shape, int]]:
    for text, parts in table.items():
        match = _SHAPE.fullmatch(text.strip())
        if match is None:
            raise CoCConfigError(f"has the key {text!r}, which is no shape; write '[m, k, n]'")
        if type(parts) is not int or parts not in ALLOWED_PARTS:
            choices = ", ".join(map(str, ALLOWED_PARTS))
            raise CoCConfigError(f"gives {text} {parts!r} parts; use one of {choices}")
        yield (int(match[1]), int(match[2]), int(match[3])), parts


def unknown_shapes(path: str, args: Any) -> Sequence[str]:
    """Return the shapes of a file that no product of the model has, as they stand in messages."""
    known = product_shapes(args)
    return [str(list(shape)) for shape, _ in shapes_of(path) if shape not in known]


def product_shapes(args: Any) -> frozenset[Shape]:
    """Return the shapes of the products of a dense layer's linears that are executed with communication."""
    from mindspeed_tp.model_sizes import ModelSizes

    t, sizes = args.tensor_model_parallel_size, ModelSizes.of(args)
    rows, h, f = sizes.positions * sizes.batch, sizes.hidden, sizes.width
    query = sizes.heads * sizes.channels
    both = query + 2 * sizes.groups * sizes.channels
    columns = ((h, both // t), (h, (1 + sizes.gated) * f // t))
    inner = (query // t, f // t)
    forward = {(rows, k, n) for k, n in columns} | {(rows, k, h) for k in inner}
    return frozenset(forward | {(rows, h, k) for k in inner})
