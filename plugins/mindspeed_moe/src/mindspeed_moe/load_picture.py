"""The loads of experts over steps as an SVG picture: a row for each expert, a column for each step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from mindspeed_moe.load_log import LoadLog, StepLoads

_COLUMNS = 200
_LEFT, _TOP, _CELL = 90, 26, 6


def picture(log: LoadLog) -> str:
    """Return a picture of all layers below one another; even loads are white, larger ones darker.

    Steps are drawn in at most 200 columns, each the mean of its steps.
    """
    layers = sorted({layer for step in log.steps for layer in step.loads})
    width, y, parts = _LEFT + min(len(log.steps), _COLUMNS) * _CELL + 20, 0, []
    for layer in layers:
        steps = [step for step in log.steps if layer in step.loads]
        parts.append(
            f'<text x="4" y="{y + 16}">layer {layer}, steps {steps[0].step} to {steps[-1].step}</text>'
        )
        for column, part in enumerate(_parts(steps)):
            loads = [sum(values) for values in zip(*(step.loads[layer] for step in part), strict=True)]
            mean = sum(loads) / len(loads) or 1.0
            for expert, load in enumerate(loads):
                parts.append(_cell(column, y + _TOP + expert * _CELL, load / mean))
        for expert in range(0, log.model.experts, max(1, log.model.experts // 8)):
            parts.append(f'<text x="4" y="{y + _TOP + expert * _CELL + _CELL}">expert {expert}</text>')
        y += _TOP + log.model.experts * _CELL + 14
    style = "text{font:10px sans-serif}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" role="img">'
        f"<title>Tokens of each expert over steps, as a multiple of the mean</title><style>{style}</style>"
        f'<rect width="{width}" height="{y}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _parts(steps: Sequence[StepLoads]) -> list[Sequence[StepLoads]]:
    columns = min(len(steps), _COLUMNS)
    cuts = [len(steps) * column // columns for column in range(columns + 1)]
    return [steps[first:end] for first, end in pairwise(cuts)]


def _cell(column: int, y: int, share: float) -> str:
    # White at the mean, blue below it, red above, darkest from four times the mean on.
    if share <= 1:
        light = round(255 * share)
        colour = f"rgb({light},{light},255)"
    else:
        over = min(1.0, (share - 1) / 3)
        colour = f"rgb({round(255 - 105 * over)},{round(255 * (1 - over))},{round(255 * (1 - over))})"
    return f'<rect x="{_LEFT + column * _CELL}" y="{y}" width="{_CELL}" height="{_CELL}" fill="{colour}"/>'
