"""``pytest --contract DIST``: the checks of a contract as test items of their own.

A failed check prints what to change and no traceback. Registered by `mindspeed_testing.pytest_plugin`
only when the option is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_core.errors import UserError
from mindspeed_testing.contract.checks import all_checks
from mindspeed_testing.contract.rules import Check, Contract, Violation


class ContractItem(pytest.Item):
    """One check."""

    def __init__(self, *, check: Check, **options: Any) -> None:
        """Take the check."""
        super().__init__(**options)
        self.check = check

    def runtest(self) -> None:
        """Run the check."""
        self.check()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Show a violation as it is; anything else with its traceback."""
        if isinstance(excinfo.value, Violation):
            return f"{self.check}:\n{excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return the text of the listing."""
        return self.path, None, str(self.check)


class ContractCollector(pytest.Collector):
    """The checks of one distribution."""

    def __init__(self, *, contract: Contract, **options: Any) -> None:
        """Take the contract."""
        super().__init__(**options)
        self.contract = contract

    def collect(self) -> Iterator[pytest.Item]:
        """Return the checks in order."""
        for check in all_checks(self.contract):
            yield ContractItem.from_parent(self, name=str(check), check=check)


class ContractPlugin:
    """Adds the contracts that the command line names."""

    def __init__(self, config: pytest.Config) -> None:
        """Read the options.

        Raises:
            pytest.UsageError: a distribution is not installed, or announces nothing.
        """
        self.contracts = []
        for dist in config.getoption("contract"):
            try:
                contract = Contract.of(
                    dist,
                    platform=config.getoption("contract_platform"),
                    proofs=not config.getoption("contract_without_proofs"),
                )
            except UserError as error:
                raise pytest.UsageError(f"--contract {error}") from None
            self.contracts.append(contract)
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            # Files are collected only where they are asked for as well.
            config.args = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Add the checks, before ``-k`` chooses."""
        for contract in self.contracts:
            collector = ContractCollector.from_parent(
                session, name=f"contract of {contract.dist}", nodeid=contract.dist, contract=contract
            )
            items += [item for item in collector.collect() if isinstance(item, pytest.Item)]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what could not be checked on this machine."""
        for contract in self.contracts:
            for reason in contract.left_out:
                terminalreporter.write_line(f"not checked here: {reason}")
