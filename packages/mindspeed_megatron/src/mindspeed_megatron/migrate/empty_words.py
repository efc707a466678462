"""Words of a launch script that are nothing: variables set nowhere, which the shell leaves out.

``$MOE_ARGS`` behind the flags of a script without experts is no value of the flag before it. Where a flag
still waits for its value, the variable stands for that value instead, and somebody has to write it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from mindspeed_core.flags.values import most_values

if TYPE_CHECKING:
    from mindspeed_core.flags.flag_set import FlagSet


def without_empty_words(
    words: Sequence[str], unset: Collection[str], flags: FlagSet
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words of a command line without variables that no flag waits for, and those variables.

    Args:
        words: flags and their values.
        unset: what stands in them for variables that are set nowhere.
        flags: the flags that say how many values they take.
    """
    kept: list[str] = []
    empty: list[str] = []
    waiting: int | None = 0
    for word in words:
        if word.startswith("--"):
            option, inline, _ = word.partition("=")
            # A flag that nobody here knows takes its first word.
            waiting = 0 if inline else most_values(flags[option].flag) if option in flags else 1
        elif word in unset and waiting == 0:
            empty.append(word)
            continue
        elif waiting:
            waiting -= 1
        kept.append(word)
    return tuple(kept), tuple(dict.fromkeys(empty))
