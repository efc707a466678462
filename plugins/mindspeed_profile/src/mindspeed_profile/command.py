"""The program ``mindspeed-profile``: traces and dumps of runs, read after them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

import mindspeed_profile
from mindspeed_core.terminal.errors import TRACEBACK
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.program import ExplainedGroup, run_program

PROGRAM = "mindspeed-profile"
EXIT_DIFFERS = 1


@click.group(cls=ExplainedGroup, name=PROGRAM, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mindspeed_profile.__version__, prog_name=PROGRAM)
@click.option(TRACEBACK, is_flag=True, expose_value=False, help="Print tracebacks of errors too.")
def program() -> None:
    """Read what --profile and --npu-datadump have written.

    Exit status: 0, or 1 where two dumps differ or files cannot be read, 2 wrong usage.
    """


@program.command("analyse", short_help="Top operators, waiting by group, idle time and bubble of traces.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--top", type=click.IntRange(min=1), default=10, show_default=True, help="Operators that are listed."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def analyse(folder: Path, top: int, as_json: bool) -> None:
    """Say where the time of the recorded steps went, from the traces of --profile in FOLDER.

    Traces of CPU and CUDA are read here; folders of NPUs are handed to msprof-analyze, where it is installed.
    """
    from mindspeed_profile.npu_folders import analyse_npu, npu_folders
    from mindspeed_profile.trace_analysis import analyse_traces, print_analysis

    if npu_folders(folder):
        analyse_npu(folder)
        return
    found = analyse_traces(folder, top)
    if as_json:
        click.echo(json.dumps([asdict(rank) for rank in found], indent=2))
    else:
        print_analysis(found)


@program.command("compare", short_help="The first module that differs between two dumps.")
@click.argument("first", metavar="A", type=click.Path(path_type=Path))
@click.argument("second", metavar="B", type=click.Path(path_type=Path))
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0.0),
    default=1e-4,
    show_default=True,
    help="Relative distance of least, largest and norm that counts as the same.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def compare(context: click.Context, first: Path, second: Path, tolerance: float, as_json: bool) -> None:
    """Name the first module, in order of execution, whose results differ between the dumps A and B.

    A and B are folders that --npu-datadump wrote; the sizes of tensor and pipeline parallelism may differ.
    """
    from mindspeed_profile.dump_comparison import compare_dumps
    from mindspeed_profile.dump_files import read_dump

    a, b = read_dump(first), read_dump(second)
    found = compare_dumps(a, b, tolerance)
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
        context.exit(EXIT_DIFFERS if found.first else 0)
    cut = [str(folder) for folder, ranks in ((first, a), (second, b)) if any(rank.cut for rank in ranks)]
    for folder in cut:
        emit(f"note: the dump in {folder} ends within a line; what is whole is compared")
    if found.missing:
        shown = ", ".join(found.missing[:5]) + (", …" if len(found.missing) > 5 else "")
        emit(f"note: {len(found.missing)} modules are in one dump alone: {shown}")
    emit(f"{found.compared} tensors compared, {found.equal} equal bit for bit, {found.differing} differ")
    one = found.first
    if one is None:
        return
    which = f", tensor {one.tensor}" if one.tensor else ""
    emit(f"first difference: step {one.step}, {one.direction} {one.call}, {one.module}{which}")
    if one.where:
        emit(f"    {one.where}")
    for change in one.changes:
        emit(f"    {change}")
    context.exit(EXIT_DIFFERS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status."""
    return run_program(program, argv, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
