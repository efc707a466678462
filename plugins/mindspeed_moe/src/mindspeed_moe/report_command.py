"""``mindspeed-features moe-report``: what the recorded loads of experts say of a layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from mindspeed_moe.load_report import Report

_SHOWN = 16


@click.command("moe-report", short_help="Loads of experts, and which layout suits them.")
@click.argument("log", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw loads over steps (SVG)."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def report(log: Path, picture: Path | None, as_json: bool) -> None:
    """Report on LOG, a file that a training wrote with --moe-load-log.

    Loads of ranks are those of experts in megatron-core's places, whatever the run did.

    \b
    mindspeed-train FLAGS --moe-load-log loads.jsonl
    mindspeed-features moe-report loads.jsonl --picture loads.svg
    """
    from mindspeed_core.errors import UserError
    from mindspeed_moe.load_log import read_log
    from mindspeed_moe.load_picture import picture as drawn
    from mindspeed_moe.load_report import report_on

    read = read_log(log)
    found = report_on(read)
    if picture is not None:
        try:
            picture.write_text(drawn(read), encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"--picture {picture}: {error.strerror}; name a file that can be written"
            ) from error
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        _print(found)


def _print(found: Report) -> None:
    from mindspeed_megatron.tables import print_table

    print_table(
        ("layer", "tokens of ranks", "tokens of experts", "dropped"),
        [
            (layer.layer, _numbers(layer.ranks), _numbers(layer.experts), f"{layer.dropped:.1%}")
            for layer in found.layers
        ],
        title=f"Mean of {found.steps} steps",
    )
    copies = sorted({number for layer in found.layers for number in layer.unevenness.copied})
    print_table(
        ("layer", "contiguous", "greedy", *(f"hot {number}" for number in copies), "bound"),
        [
            (
                layer.layer,
                f"{layer.unevenness.contiguous:.2f}",
                f"{layer.unevenness.greedy:.2f}",
                *(f"{layer.unevenness.copied[number]:.2f}" for number in copies),
                f"{layer.unevenness.bound:.2f}",
            )
            for layer in found.layers
        ],
        title="Largest rank over the mean, by where experts are computed",
    )
    for quantity, (choice, why) in (
        ("dispatcher", found.dispatcher),
        ("communication plan", found.plan),
        ("placement", found.placement),
    ):
        click.echo(f"recommended {quantity}: {choice} ({why})")


def _numbers(values: list[float]) -> str:
    shown = " ".join(f"{value:.0f}" for value in values[:_SHOWN])
    return f"{shown} … of {len(values)}" if len(values) > _SHOWN else shown
