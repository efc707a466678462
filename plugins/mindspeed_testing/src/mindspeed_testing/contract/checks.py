"""Every check of a distribution's contract."""

from __future__ import annotations

from mindspeed_testing.contract import entry_points, features, sessions
from mindspeed_testing.contract.rules import Check, Contract


def all_checks(contract: Contract) -> list[Check]:
    """Return every check that can be made on this machine; ``contract.left_out`` names the others."""
    contract.left_out.clear()
    return [*entry_points.checks(contract), *features.checks(contract), *sessions.checks(contract)]


def contract_checks(dist: str, *, platform: str = "auto", proofs: bool = True) -> list[Check]:
    """Return the checks of a distribution's contract, for a test of one's own.

    ``@pytest.mark.parametrize("check", contract_checks("acme-tools"), ids=str)`` over a test that calls
    ``check()``.

    Args:
        dist: name of the distribution.
        platform: the platform on which sessions are opened.
        proofs: run the scenarios of features too.

    Raises:
        UserError: the distribution is not installed, or announces nothing.
    """
    return all_checks(Contract.of(dist, platform=platform, proofs=proofs))
