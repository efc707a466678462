"""The one table: the verdict on an option that nobody declares, whoever asks."""

from __future__ import annotations

from functools import lru_cache

from mindspeed_megatron.upstream.noted import NOTED_FLAGS
from mindspeed_megatron.upstream.refused import REFUSED_FLAGS
from mindspeed_megatron.upstream.translations import TRANSLATIONS
from mindspeed_megatron.upstream.verdicts import REFUSED, Verdict

VERDICTS: tuple[Verdict, ...] = (*NOTED_FLAGS, *REFUSED_FLAGS)
"""Every verdict; the first that covers an option and its values holds."""


def verdict_on(option: str, values: tuple[str, ...] | None = None) -> Verdict | None:
    """Return the verdict on an option with the values given to it; None for one nobody has judged.

    Args:
        option: the option string.
        values: the words behind it; None where they do not matter.
    """
    return next((verdict for verdict in VERDICTS if verdict.covers(option, values)), None)


def refusal_of(option: str) -> Verdict | None:
    """Return the verdict that refuses an option; None where none does, whatever its values."""
    return next((v for v in VERDICTS if v.kind == REFUSED and v.covers(option)), None)


def is_judged(option: str) -> bool:
    """Return whether the table says something about an option."""
    return option in TRANSLATIONS or verdict_on(option) is not None


@lru_cache(maxsize=1)
def _switches() -> frozenset[str]:
    from mindspeed_megatron.upstream.megatron_lm_flags import megatron_lm_flags

    facts = megatron_lm_flags()[1]
    return frozenset(o for one in facts if one["value"] == "switch" for o in one["options"])


def takes_no_value(option: str) -> bool:
    """Return whether an option is known to be a switch of Megatron-LM."""
    return option in _switches()
