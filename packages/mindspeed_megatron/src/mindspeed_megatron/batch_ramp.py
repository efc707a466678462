"""The global batch size while it grows at the start of a run (``--rampup-batch-size``).

The rule is that of megatron-core up to 0.17; later versions have another kind of schedule in its place.
"""

from __future__ import annotations


def ramped_batch_size(target: int, start: int, increment: int, samples: int, consumed_samples: int) -> int:
    """Return the global batch size of the step that follows after ``consumed_samples``.

    Args:
        target: global batch size after the ramp.
        start: the first one, below ``target``.
        increment: by which it grows; divides the difference of the two.
        samples: samples over which it grows, in steps of equal length.
        consumed_samples: so far.
    """
    if consumed_samples > samples:
        return target
    steps = (target - start) // increment
    return min(start + int(consumed_samples / (samples / steps)) * increment, target)
