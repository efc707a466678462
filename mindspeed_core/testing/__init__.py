"""Tools that prove features: worlds, canonical state, comparison, the contract of plugins.

The submodules hold the subjects: `worlds` (several ranks on this machine), `canonical` (one unsharded state
of any layout), `compare`, `training` (a short training as one side of a proof) and
`verify`. Importing this package loads neither torch nor megatron: pytest imports it for every test run.
"""

from __future__ import annotations

from mindspeed_core.testing.worlds import WorldError, run_world

__all__ = ["WorldError", "run_world"]
