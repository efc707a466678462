"""``mindspeed-features verify``: runs the proofs that features carry, on this machine.

Each scenario trains a small model several times, with and without the feature, in different layouts or across
a checkpoint, and compares numbers and costs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import click

from mindspeed_core.terminal.errors import EXIT_PROBLEMS
from mindspeed_core.terminal.feature_names import complete_features, find_feature
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.training_flags import platform_option

if TYPE_CHECKING:
    from mindspeed_core.feature import Feature
    from mindspeed_megatron.backend_contracts import BackendContract
    from mindspeed_testing.verify import Verdict


@click.command("verify", short_help="Prove features on this machine.")
@click.argument("names", nargs=-1, shell_complete=complete_features)
@click.option("--all", "everything", is_flag=True, help="Every installed feature.")
@click.option(
    "--fake", is_flag=True, help="Compare bytes and communication of a dry run with a world that computes."
)
@click.option(
    "--contract",
    "contracts",
    multiple=True,
    type=click.Choice(["hccl", "hccl-910_93", "hccl-950", "nccl", "none"]),
    help="Hold every call to the rules of this backend, in place of those of the feature's platforms.",
)
@platform_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    context: click.Context,
    names: tuple[str, ...],
    everything: bool,
    fake: bool,
    contracts: tuple[str, ...],
    platform: str | None,
    as_json: bool,
) -> None:
    """Run the proofs of the features NAMES: short trainings, compared.

    A proof compares trainings with and without the feature, with the feature in two layouts, or a training
    with its continuation from a checkpoint. Each line says what was compared, and in which layouts.

    Every call of communication keeps the rules of NCCL and HCCL, as far as the feature is for their
    platforms, and ranks' calls are played in the order in which these serve them; --contract chooses rules.

    With --fake each proof's flags are trained on CPU and in a dry run: bytes and communication of every rank
    must be the same.

    Proofs that do not apply to the platform are left out and named. Exit status 1 when a proof fails, when a
    feature carries none though it trains, and when nothing was proved.
    """
    from mindspeed_core.platforms.selection import choose_platform
    from mindspeed_core.registry import Registry

    if everything == bool(names):
        raise click.UsageError("name features, or give --all")
    if fake and platform not in (None, "cpu"):
        raise click.UsageError("--fake compares with --platform cpu; leave --platform out")
    registry = Registry.discover()
    found = list(registry.features.values()) if everything else [find_feature(registry, n) for n in names]
    chosen, _ = choose_platform("cpu" if fake else platform or "auto", registry)
    left_out: list[str] = []
    verdicts: list[Verdict] = []
    # The same feature may be named twice, by name and by flag.
    kinds = registry.platform(chosen).kinds()
    wanted = list(dict.fromkeys(record.cls for record in found))
    versions = {record.cls: record.hook_api for record in found}
    for verdict in _prove(wanted, chosen, kinds, left_out, versions, fake=fake, contracts=contracts):
        verdicts.append(verdict)
        if not as_json:
            emit(f"{'passed' if verdict.passed else 'FAILED'}  {verdict.feature} / {verdict.scenario}")
            for line in (*verdict.sides, *verdict.remarks):
                emit(f"        {line}")
    ok = bool(verdicts) and all(verdict.passed for verdict in verdicts)
    if as_json:
        report = {
            "ok": ok,
            "platform": chosen,
            "verdicts": [asdict(verdict) for verdict in verdicts],
            "left_out": left_out,
        }
        emit(json.dumps(report, indent=2))
    else:
        _print(verdicts, left_out)
    context.exit(0 if ok else EXIT_PROBLEMS)


def _prove(
    features: list[type[Feature]],
    platform: str,
    kinds: frozenset[str],
    left_out: list[str],
    versions: Mapping[type[Feature], str],
    *,
    fake: bool,
    contracts: tuple[str, ...],
) -> Iterator[Verdict]:
    from mindspeed_testing.dry_run import verify_dry_run, why_not_dry
    from mindspeed_testing.verify import Verdict, verify

    for feature in features:
        if feature.trains_nothing:
            left_out.append(f"{feature.name} ({feature.trains_nothing})")
        elif not feature.verify:
            reason = (
                "carries no scenario; a feature without a proof is not trusted. Add Scenario(...) to verify"
            )
            yield Verdict(feature.name, "-", passed=False, tolerance=0.0, error=reason)
        for scenario in feature.verify:
            applicable = kinds & {*(scenario.platforms or feature.platforms)}
            reason = (
                f"not for platform {platform}" if not applicable else why_not_dry(scenario) if fake else ""
            )
            if reason:
                left_out.append(f"{feature.name} / {scenario.name} ({reason})")
            else:
                proved = partial(
                    verify, platform=platform, contracts=_contracts(contracts), hook_api=versions[feature]
                )
                yield (verify_dry_run if fake else proved)(feature, scenario)


def _contracts(names: tuple[str, ...]) -> list[BackendContract] | None:
    """Return the contracts of these names; None, which leaves the choice to each feature, without any."""
    from mindspeed_megatron.backend_contracts.hccl import HCCL
    from mindspeed_megatron.backend_contracts.nccl import NCCL

    if not names:
        return None
    known = {"hccl": HCCL["910B"], "hccl-910_93": HCCL["910_93"], "hccl-950": HCCL["950"], "nccl": NCCL}
    return [known[name] for name in names if name != "none"]


def _print(verdicts: list[Verdict], left_out: list[str]) -> None:
    from mindspeed_megatron.tables import print_table

    rows = [
        (
            verdict.feature,
            verdict.scenario,
            "passed" if verdict.passed else "FAILED",
            "-" if verdict.largest_error is None else f"{verdict.largest_error:.1e}",
            f"{verdict.tolerance:g}",
            "; ".join(str(gain) for gain in verdict.gains) or "-",
        )
        for verdict in verdicts
    ]
    if rows:
        emit()
        headers = ("feature", "proof", "verdict", "largest error", "allowed", "gains")
        print_table(headers, rows, heading=(0, 1))
    for verdict in verdicts:
        if not verdict.passed:
            emit(f"\n{verdict}")
    if left_out:
        emit("\nleft out: " + "; ".join(left_out))
    if not verdicts:
        emit("nothing was proved")
