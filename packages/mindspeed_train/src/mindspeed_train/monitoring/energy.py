"""Energy that a training takes, where a device tells: ``--log-energy``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from mindspeed_core.run import Run


class EnergyMeter:
    """The energy of the devices of all ranks between two log lines."""

    def __init__(self, run: Run) -> None:
        """Begin to measure."""
        self._step = run.iteration
        self._joules = run.session.platform.energy()
        self._time = time.monotonic()

    def figures(self, run: Run) -> dict[str, float]:
        """Return ``energy_joules_per_step`` and ``power_watts``, means over the ranks whose device tells.

        Collective. Nothing where no device tells.
        """
        joules, now = run.session.platform.energy(), time.monotonic()
        steps, seconds = run.iteration - self._step, now - self._time
        known = joules is not None and self._joules is not None and steps > 0 and seconds > 0
        used = (joules or 0.0) - (self._joules or 0.0) if known else 0.0
        self._step, self._joules, self._time = run.iteration, joules, now
        sums = torch.tensor(
            [used / steps if known else 0.0, used / seconds if known else 0.0, float(known)],
            dtype=torch.float32,
            device=run.dist.device,
        )
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        per_step, watts, telling = sums.tolist()
        if not telling:
            return {}
        return {"energy_joules_per_step": per_step / telling, "power_watts": watts / telling}
