"""Declarations of the package: extension points of searches, and MindSpeed's flags of automatic tuning."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mindspeed_core.feature import ExtensionPoint, Feature, Flag, HookApi, hookimpl

_SWITCHES = ("--auto-settings", "--auto-tuning", "--auto-parallel")
_LAUNCH = ("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port")
_NOTHING_MEASURED = "layouts are ranked by dry runs, and no profile is taken"


class AutoSettings(Feature):
    """Search for the best layouts instead of training, where a training script is started by ``python``."""

    name = "auto-settings"
    family = "tuning"
    summary = "Search for the fastest layouts instead of training, and print the best three"
    level = 2
    stability = "prototype"
    flags = (
        Flag(
            "--auto-settings",
            aliases=_SWITCHES[1:],
            help="Search for the fastest layouts for --nnodes times --nproc-per-node ranks, print the "
            "best three "
            "and end.",
        ),
        Flag("--auto-settings-launch", help="Start the best layout with torchrun when the search is done."),
        Flag(
            "--auto-settings-work-dir",
            type=str,
            aliases=("--auto-tuning-work-dir",),
            help="Folder of the search's journal and reports; the current one by default.",
        ),
        Flag(
            "--auto-settings-ranks",
            type=int,
            default=8,
            aliases=("--auto-tuning-ranks",),
            help="Ranks of MindSpeed's profiling runs, of which there are none here.",
        ),
        Flag(
            "--auto-settings-log-level",
            type=str,
            default="info",
            choices=("warning", "info", "debug"),
            aliases=("--auto-tuning-log-level",),
            help="warning prints the result alone, info and debug how far the search is too.",
        ),
        Flag(
            "--auto-settings-type",
            type=str,
            default="white",
            choices=("white", "black", "mixed"),
            help="MindSpeed's ways to search, all of which are one here.",
        ),
        Flag("--target-nnodes", type=int, help="Nodes to search for, where not those of --nnodes."),
        Flag("--prof-file", type=str, help="MindSpeed's profile of operators, which is not needed here."),
        Flag("--nnodes", type=int, default=1, aliases=("--nodes",), help="Nodes to search for."),
        Flag("--nproc-per-node", type=int, default=1, help="Ranks of each node."),
        Flag("--node-rank", type=int, default=0, per_rank=True, help="Of this node; node 0 searches."),
        Flag("--master-addr", type=str, default="127.0.0.1", help="Where --auto-settings-launch meets."),
        Flag("--master-port", type=int, default=29500, help="The port of it."),
        Flag(
            "--tune-hardware",
            type=str,
            help="Hardware file of --auto-settings: the name of a shipped one, or what calibrate writes.",
        ),
        Flag("--tune-space", type=str, help="Values that --auto-settings tries, as TOML."),
        Flag(
            "--tune-budget-minutes",
            type=float,
            help="--auto-settings begins no dry run after so many minutes.",
        ),
        Flag("--tune-trials", type=int, default=30, help="Layouts that --auto-settings plans by dry runs."),
    )
    modes = ("train",)
    trains_nothing = (
        "it searches for layouts, prints the best ones and ends the program before a training begins"
    )
    docs = "mindspeed_tune:docs/auto-settings.md"
    fake_tensors: ClassVar[bool | None] = True
    affects_checkpoint = False

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether a search is asked for, or a flag is given that belongs to one or to a launcher."""
        return any(getattr(args, flag.dest, flag.default) != flag.default for flag in cls.flags)

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Return what keeps the search from being started."""
        given = [flag.name for flag in cls.flags if getattr(args, flag.dest, flag.default) != flag.default]
        if not getattr(args, "auto_settings", False):
            launching = [name for name in given if name in _LAUNCH]
            if launching:
                return [
                    f"{' and '.join(launching)}: belong to the launcher; give them to torchrun, or use "
                    "mindspeed-train --nproc (with --auto-settings they say what is searched for)"
                ]
            return [f"{' and '.join(given)}: belong to a search; add --auto-settings, or leave them out"]
        if int(os.environ.get("WORLD_SIZE") or 1) > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
            return ["--auto-settings is started by python, once on every node, and not by torchrun"]
        wrong = [
            f"{name} must be 1 or more"
            for name, value in (
                ("--nnodes", args.nnodes),
                ("--nproc-per-node", args.nproc_per_node),
                ("--target-nnodes", 1 if args.target_nnodes is None else args.target_nnodes),
                ("--tune-trials", args.tune_trials),
            )
            if value < 1
        ]
        if args.auto_settings_launch and (args.target_nnodes or args.nnodes) > 1:
            wrong.append(
                "--auto-settings-launch starts the ranks of one node; with several of them start the "
                "command that "
                "the search prints on each"
            )
        if not args.tune_hardware:
            wrong.append(
                "--tune-hardware is missing: name ascend-910b, ascend-910c, a100-80gb, h100, h200, "
                "or a file that "
                "`mindspeed-tune calibrate -- COMMAND` writes"
            )
        return wrong

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return MindSpeed's flags that a search without profiling runs does not need."""
        found = dict.fromkeys(("--auto-settings-ranks", "--prof-file"), _NOTHING_MEASURED)
        return {**found, "--auto-settings-type": "there is one way to search"}

    @hookimpl(tryfirst=True)
    def prepare_process(self, session: Any, args: Any) -> Any:
        """Search, print the best layouts and end the program."""
        from mindspeed_tune.auto_settings import search_and_end

        search_and_end(session, args, [flag.name for flag in self.flags])


DECLARATIONS = (
    HookApi("1.3"),
    ExtensionPoint(
        "tune.strategies",
        "mindspeed_tune.strategies",
        "choices of the candidates that a search plans by dry runs of their own",
        check="mindspeed_tune.contributions:check_callable",
    ),
    ExtensionPoint(
        "tune.costs",
        "mindspeed_tune.costs",
        "corrections of a candidate's estimated step and memory",
        check="mindspeed_tune.contributions:check_callable",
    ),
    AutoSettings,
)
