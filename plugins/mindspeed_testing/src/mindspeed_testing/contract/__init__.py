"""The contract of a plugin: what any distribution with features, platforms or hosts has to keep.

``pytest --contract acme-tools`` runs nothing but the contract of an installed distribution; a test of your
own parametrizes over `contract_checks`. The rules concern what a distribution announces (`entry_points`), its
features (`features`) and trainings with them (`sessions`).
"""

from __future__ import annotations

from mindspeed_testing.contract.checks import all_checks, contract_checks
from mindspeed_testing.contract.rules import Check, Contract, NewerRuleWarning, Violation

__all__ = ["Check", "Contract", "NewerRuleWarning", "Violation", "all_checks", "contract_checks"]
