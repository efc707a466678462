"""Errors of megatron-core's configuration classes, with the flag that fills the field they are about."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping

from mindspeed_core.errors import ArgumentError
from mindspeed_core.hosts.standalone.arguments.errors import argument_error
from mindspeed_core.hosts.standalone.arguments.refusals import option_of
from mindspeed_core.megatron.config_fields import config_fields
from mindspeed_core.megatron.config_flags import dest_of


def refused_configuration(args: Namespace, provenance: Mapping[str, str], error: Exception) -> ArgumentError:
    """Make the error about the flag that megatron-core's refusal of a configuration is about.

    A refusal names fields, as a rule the wrong one first. Where it names none, the flags that were given for
    fields are named together.

    Args:
        args: the arguments the configuration was filled from.
        provenance: where each argument's value came from.
        error: the refusal.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    fields = {field.name for field in config_fields()}
    given = [name for name in sorted(fields) if provenance.get(dest_of(name), "default") != "default"]
    named = [name for name in dict.fromkeys(re.findall(r"\w+", text)) if name in fields]
    # Most refusals are about a pair of which one was given; what stands at its default is not the mistake.
    about = [name for name in named if name in given] or named or given
    about = about or ["num_layers"]
    others = [option_of(name) for name in about[1:6]]
    remedy = "change it" + (f", or one of {', '.join(others)}" if others else ", or leave it out")
    return argument_error(args, option_of(about[0]), f"megatron-core refuses it: {text}", remedy)
