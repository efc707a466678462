"""Ranges of numbers: what torch, numpy or the operating system would refuse in the middle of a start.

Each limit is somebody else's: a float that a float32 tensor cannot hold, a seed that numpy does not take, a
time-out that does not fit into a clock.
"""

from __future__ import annotations

from argparse import Namespace
from math import inf

from mindspeed_train.arguments.errors import argument_error, option

_LARGEST_FLOAT = 3.4028234663852886e38
_LARGEST_SEED = 2**31 - 1
_MINUTES = 525_600
"""The minutes of a year: longer waits overflow the clocks of threads."""
_WORKERS = 1024

_AT_MOST = {
    "seed": _LARGEST_SEED,
    "hang_timeout_minutes": _MINUTES,
    "num_workers": _WORKERS,
}
_SHARES = ("adam_beta1", "adam_beta2")
_NOT_NEGATIVE = ("adam_eps", "sgd_momentum", "norm_epsilon", "decoupled_lr", "decoupled_min_lr")
_ABOVE_ZERO = ("rotary_base", "rotary_percent", "rope_scaling_factor", "rotary_seq_len_interpolation_factor")


def check_limits(args: Namespace) -> None:
    """Refuse numbers outside of the range that whoever uses them can hold.

    Raises:
        ArgumentError: names the flag, its value and the limit.
    """
    for name, value in vars(args).items():
        for number in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(number, float) and _LARGEST_FLOAT < abs(number) < inf:
                reason = "is larger than any number of 32 bits"
                raise argument_error(args, option(name), reason, f"stay below {_LARGEST_FLOAT:.3g}")
    for name, most in _AT_MOST.items():
        if (getattr(args, name) or 0) > most:
            raise argument_error(args, option(name), f"is more than {most}", f"use at most {most}")
    for name in _SHARES:
        if not 0.0 <= getattr(args, name) < 1.0:
            raise argument_error(args, option(name), "is not a share below 1", "use 0.9, for instance")
    for name in _NOT_NEGATIVE:
        if (getattr(args, name, None) or 0) < 0:
            raise argument_error(args, option(name), "must not be negative", "use 0 or more")
    for name in _ABOVE_ZERO:
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise argument_error(args, option(name), "must be above zero", "raise it, or leave it out")
    if args.rotary_percent > 1:
        raise argument_error(args, "--rotary-percent", "is more than the whole head", "use at most 1.0")
    for name in ("lr", "decoupled_lr"):
        _check_step_size(args, name)


def _check_step_size(args: Namespace, name: str) -> None:
    """Refuse a learning rate whose step or weight decay is beyond float32; torch raises in the first step."""
    rate = getattr(args, name, None) or 0.0
    if rate == inf:
        return
    if args.optimizer == "adam" and rate / (1 - args.adam_beta1) > _LARGEST_FLOAT:
        reason = f"divided by 1 - --adam-beta1 {args.adam_beta1} is larger than any number of 32 bits"
        raise argument_error(args, option(name), reason, "lower it")
    decays = (args.weight_decay, args.start_weight_decay, args.end_weight_decay)
    decay = max(abs(value or 0.0) for value in decays)
    if decay != inf and rate * decay > _LARGEST_FLOAT:
        reason = f"times a weight decay of {decay} is larger than any number of 32 bits"
        raise argument_error(args, option(name), reason, "lower one of the two")
