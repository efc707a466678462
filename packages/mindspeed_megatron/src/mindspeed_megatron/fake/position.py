"""The rank of a dry run: by its flags, or by the variables of the launch that is planned."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping

from mindspeed_core.errors import ArgumentError
from mindspeed_core.platforms.machine import numbered_variable
from mindspeed_core.platforms.platform import Position

_WORLD = "--fake-world-size"
_RANK = "--fake-rank"


def fake_position(args: Namespace, environment: Mapping[str, str] | None = None) -> Position:
    """Return rank, world size and local rank of a dry run.

    A flag and the launcher's variable that it stands for may both be given where they say the same.

    Raises:
        ArgumentError: a flag contradicts the launcher's variable, or the rank is outside of the world.
    """
    env = os.environ if environment is None else environment
    world_size = _one_of(_WORLD, getattr(args, "fake_world_size", None), "WORLD_SIZE", env, 1)
    rank = _one_of(_RANK, getattr(args, "fake_rank", None), "RANK", env, 0)
    if world_size < 1:
        raise ArgumentError(
            _WORLD, world_size, "a world has at least one rank", "give the size of the launch"
        )
    if not 0 <= rank < world_size:
        reason = f"is outside of a world of {world_size} rank{'s' if world_size > 1 else ''}"
        way_out = f"use 0 to {world_size - 1}, or raise {_WORLD}"
        raise ArgumentError(_RANK, rank, reason, way_out)
    # Every rank is planned on the first device.
    return Position(rank, world_size, 0)


def _one_of(flag: str, given: int | None, variable: str, env: Mapping[str, str], default: int) -> int:
    launched = numbered_variable(variable, -1, env)
    if launched < 0:
        return default if given is None else given
    if given is not None and given != launched:
        reason = f"the launcher says {variable}={launched}"
        raise ArgumentError(flag, given, reason, f"drop the flag, or unset {variable}")
    return launched
