"""The pytest plugin: fixtures for worlds and equivalence, and ``--contract`` for any plugin's author.

Loaded by every pytest run in an environment that has the core, so it imports nothing heavy until used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mindspeed_testing.verify import Verdict


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer ``--contract`` and what belongs to it."""
    group = parser.getgroup("mindspeed", "contracts of mindspeed-core's plugins")
    group.addoption(
        "--contract",
        action="append",
        default=[],
        metavar="DISTRIBUTION",
        help="hold an installed distribution to the contract of plugins; without paths nothing else is run",
    )
    group.addoption(
        "--contract-platform",
        default="auto",
        metavar="NAME",
        help="the platform on which the contract opens sessions; by default the best available",
    )
    group.addoption(
        "--contract-without-proofs",
        action="store_true",
        help="plan the proofs of features, but do not run them",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Load the contract where it is asked for."""
    if config.getoption("contract"):
        from mindspeed_testing.contract.pytest_option import ContractPlugin

        config.pluginmanager.register(ContractPlugin(config), "mindspeed-contract")


@pytest.fixture(scope="session")
def mindspeed_world() -> Callable[..., list[Any]]:
    """Return `mindspeed_testing.run_world`: called with function, size and arguments, one result per rank."""
    from mindspeed_testing.worlds import run_world

    return run_world


@pytest.fixture(scope="session")
def mindspeed_equivalence() -> Callable[..., Verdict]:
    """Return `mindspeed_testing.verify.assert_equivalent`, which compares two short trainings."""
    from mindspeed_testing.verify import assert_equivalent

    return assert_equivalent


@pytest.fixture(scope="session")
def world(mindspeed_world: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return `mindspeed_world`, under its name before 0.2."""
    _renamed("world")
    return mindspeed_world


@pytest.fixture(scope="session")
def equivalence(mindspeed_equivalence: Callable[..., Verdict]) -> Callable[..., Verdict]:
    """Return `mindspeed_equivalence`, under its name before 0.2."""
    _renamed("equivalence")
    return mindspeed_equivalence


def _renamed(name: str) -> None:
    warnings.warn(
        f"the fixture {name!r} of mindspeed-testing is called 'mindspeed_{name}'; the old name goes with 0.2",
        DeprecationWarning,
        stacklevel=2,
    )
