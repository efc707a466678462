"""MindSpeed's automatic tuning: a script that is started by ``python`` searches instead of training."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.flags.flag_set import known_flags
from mindspeed_tune.candidate import (
    CONTEXT,
    EXPERT,
    LAYERS_PER_CHUNK,
    MICRO_BATCH,
    PIPELINE,
    RECOMPUTE,
    TENSOR,
    changed_arguments,
)
from mindspeed_tune.search_command import Options, search_layouts

_SHOWN = 3
_NAMES = {
    TENSOR: "tensor_model_parallel_size",
    PIPELINE: "pipeline_model_parallel_size",
    LAYERS_PER_CHUNK: "num_layers_per_virtual_pipeline_stage",
    CONTEXT: "context_parallel_size",
    EXPERT: "expert_model_parallel_size",
    MICRO_BATCH: "micro_batch_size",
    RECOMPUTE: "recompute_granularity",
}


def search_and_end(session: Any, args: Any, own: Sequence[str]) -> NoReturn:
    """Search for the layouts of the running program's training, and end it.

    Args:
        session: whose host says what the program is.
        args: the parsed arguments.
        own: flags of the search, which are no part of the training.

    Raises:
        SystemExit: always; status 0 when layouts were found.
    """
    if args.node_rank:
        print(f"node {args.node_rank} waits for nothing: node 0 searches for all of them")
        raise SystemExit(0)
    flags = known_flags(session.registry)
    arguments = changed_arguments(sys.argv[1:], dict.fromkeys(own), flags)
    nodes = args.target_nnodes or args.nnodes
    started = _program(session)
    launcher = ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(args.nproc_per_node)]
    folder = Path(args.auto_settings_work_dir or ".")
    quiet = args.auto_settings_log_level == "warning"
    report = search_layouts(
        [*launcher, *started, *arguments],
        Options(
            hardware=args.tune_hardware,
            space=Path(args.tune_space) if args.tune_space else None,
            work_dir=folder,
            trials=args.tune_trials,
            budget_minutes=args.tune_budget_minutes,
        ),
        (lambda text: None) if quiet else lambda text: print(text, file=sys.stderr, flush=True),
    )
    from mindspeed_tune.report_pages import write_reports

    write_reports(report, folder)
    for line in best_lines(report):
        print(line)
    if args.auto_settings_launch:
        _launch(report, args)
    raise SystemExit(0)


def best_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the best layouts in MindSpeed's form: a number, the settings, and the expected time."""
    lines = []
    for number, row in enumerate(report["top"][:_SHOWN], start=1):
        settings = row["settings"]
        sizes = ", ".join(
            f"{name}: {settings[flag]}" for flag, name in _NAMES.items() if settings.get(flag) is not None
        )
        lines += [
            f"Top {number}: {sizes}, expected step {row['seconds'] * 1e3:.1f} ms, "
            f"peak memory {row['needed'] / 2**30:.2f} GiB",
            f"  {row['start']}",
        ]
    return lines


def _program(session: Any) -> list[str]:
    if session.host.name == DEFAULT_HOST:
        return ["-m", "mindspeed_core.train"]
    return [sys.argv[0]]


def _launch(report: Mapping[str, Any], args: Any) -> NoReturn:
    """Become the best layout's training."""
    words = shlex.split(report["start"])
    place = ["--node-rank", str(args.node_rank), "--master-addr", args.master_addr]
    words[1:1] = [*place, "--master-port", str(args.master_port)]
    sys.stdout.flush()
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    os.execv(sys.executable, command)
