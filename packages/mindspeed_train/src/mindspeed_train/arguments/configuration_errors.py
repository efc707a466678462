"""Errors of megatron-core's configuration classes, with the flag that fills the field they are about."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping

from mindspeed_core.errors import ArgumentError
from mindspeed_megatron.config_fields import config_fields
from mindspeed_megatron.config_flags import dest_of, why_excluded
from mindspeed_train.arguments.errors import argument_error
from mindspeed_train.arguments.refusals import option_of


def refused_configuration(args: Namespace, provenance: Mapping[str, str], error: Exception) -> ArgumentError:
    """Make the error about the flag that megatron-core's refusal of a configuration is about.

    A refusal names fields, not always those that were given, and some are prose: of the given flags the one
    that shares most words with it is meant.

    Args:
        args: the arguments the configuration was filled from.
        provenance: where each argument's value came from.
        error: the refusal.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    words = set(re.findall(r"[a-z0-9]+", text.lower()))
    fields = [field.name for field in config_fields() if not why_excluded(field)]

    def shared(name: str) -> float:
        parts = name.split("_")
        return (name in text) + sum(part in words for part in parts) / len(parts)

    given = [name for name in fields if provenance.get(dest_of(name), "default") != "default"]
    about = sorted(dict.fromkeys(given), key=shared, reverse=True) or ["num_layers"]
    others = [option_of(name) for name in about[1:4] if shared(name)]
    remedy = "change it" + (f", or one of {', '.join(others)}" if others else ", or leave it out")
    return argument_error(args, option_of(about[0]), f"megatron-core refuses it: {text}", remedy)
