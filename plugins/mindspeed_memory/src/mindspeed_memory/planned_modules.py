"""The modules that patterns of names choose, on all ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.transformer_block import TransformerBlock

from mindspeed_core.errors import UserError
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_megatron.unwrap import unwrap
from mindspeed_memory.patterns import Pattern, outermost

if TYPE_CHECKING:
    from mindspeed_core.session import Session


def planned_modules(session: Session, chunks: Sequence[Any], flag: str, patterns: Sequence[str]) -> list[Any]:
    """Return the modules of this rank whose names match, without those inside of another one.

    Collective over all ranks: a stage of a pipeline holds a part of the names. In a dry run the others do not
    exist, and nothing is refused.

    Args:
        session: the open session.
        chunks: the model chunks of the rank.
        flag: that gave the patterns.
        patterns: see `Pattern`.

    Raises:
        UserError: a pattern matches nothing on any rank; names what there is.
    """
    wanted = [Pattern.of(text) for text in patterns]
    modules = [dict(_named(unwrap(chunk))) for chunk in chunks]
    names = [name for chunk in modules for name in chunk]
    matched = [any(pattern.matches(name) for name in names) for pattern in wanted]
    found = all_gather_values(matched)
    for index, pattern in enumerate(wanted):
        if not session.platform.dry_run and not any(rank[index] for rank in found):
            raise UserError(f"{flag} {pattern.text} matches no module; there are {_kinds(names)}")
    chosen = []
    for chunk in modules:
        matching = [name for name in chunk if any(pattern.matches(name) for pattern in wanted)]
        chosen += [chunk[name] for name in outermost(matching)]
    return chosen


def _named(chunk: Any) -> Iterator[tuple[str, Any]]:
    """Yield modules with their names; layers have their number in the whole model, in every layout."""
    numbered: dict[str, str] = {}
    for name, module in chunk.named_modules():
        if not name:
            continue
        if isinstance(module, TransformerBlock):
            for index, layer in enumerate(module.layers):
                numbered[f"{name}.layers.{index}"] = f"{name}.layers.{layer.layer_number - 1}"
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            here = ".".join(parts[:end])
            if here in numbered:
                name = ".".join((numbered[here], *parts[end:]))
                break
        yield name, module


def _kinds(names: Sequence[str]) -> str:
    """Return the names of a rank with numbers left out, the shortest twenty."""
    general = {".".join("{*}" if part.isdecimal() else part for part in name.split(".")) for name in names}
    return ", ".join(sorted(general, key=lambda name: (name.count("."), name))[:20])
