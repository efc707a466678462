"""The pytest plugin: fixtures for worlds and equivalence in the tests of every plugin.

Loaded by every pytest run in an environment that has the core, so it imports nothing heavy until used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mindspeed_core.testing.verify import Verdict


@pytest.fixture(scope="session")
def world() -> Callable[..., list[Any]]:
    """`mindspeed_core.testing.run_world`: ``world(function, size, *args)`` gives one result per rank."""
    from mindspeed_core.testing.worlds import run_world

    return run_world


@pytest.fixture(scope="session")
def equivalence() -> Callable[..., Verdict]:
    """`mindspeed_core.testing.verify.assert_equivalent`: two short trainings with different flags agree."""
    from mindspeed_core.testing.verify import assert_equivalent

    return assert_equivalent
