"""The program ``mindspeed-train``: training from flags, and the tools around it.

``mindspeed-train FLAGS`` trains; ``mindspeed-train COMMAND`` runs a tool (``prepare-text``, ``sample``). The
same program runs under torchrun as ``torchrun … -m mindspeed_core.train FLAGS``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from mindspeed_core.terminal.errors import guarded

_COMMANDS = {
    "inspect": (
        "mindspeed_core.hosts.standalone.checkpoint.inspection:command",
        "show what a checkpoint holds and whether it is intact",
    ),
    "prepare-text": ("mindspeed_core.hosts.standalone.text.prepare:command", "turn text into a dataset"),
    "sample": ("mindspeed_core.hosts.standalone.sample:command", "continue a prompt with a trained model"),
}

_USAGE = """usage: mindspeed-train FLAGS             train (here, or as a worker of torchrun or srun)
       mindspeed-train --nproc N FLAGS   train with N processes on this machine
       mindspeed-train COMMAND ...       run a tool

commands:
{commands}

Flags have Megatron-LM's names. `mindspeed-features plan -- FLAGS` shows what they switch on.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit status: 0 done, 1 a problem (printed), 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _COMMANDS:
        from mindspeed_core.terminal.quiet import quieten

        quieten()
        target, _ = _COMMANDS[arguments[0]]
        module, _, name = target.partition(":")
        command = getattr(import_module(module), name)
        return guarded(
            lambda: command.main(arguments[1:], f"mindspeed-train {arguments[0]}", standalone_mode=False)
        )
    if arguments and arguments[0] == "--version":
        from mindspeed_core import __version__

        print(f"mindspeed-train {__version__}")
        return 0
    if not arguments or arguments[0] == "help" or {"-h", "--help"} & set(arguments):
        return _help()
    if not arguments[0].startswith("-"):
        from difflib import get_close_matches

        close = get_close_matches(arguments[0], _COMMANDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f" (commands: {', '.join(_COMMANDS)})"
        print(f"mindspeed-train: no command {arguments[0]!r}{hint}", file=sys.stderr)
        return 2
    return _train(arguments)


def _help() -> int:
    from mindspeed_core.flags.flag_set import flag_set
    from mindspeed_core.registry import Registry

    width = max(len(name) for name in _COMMANDS)
    lines = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in _COMMANDS.items())
    print(_USAGE.format(commands=lines))
    print(flag_set(Registry.discover(), "standalone").format_help())
    return 0


def _train(arguments: Sequence[str]) -> int:
    from mindspeed_core.launch import environment, start, worker
    from mindspeed_core.terminal.failure import report
    from mindspeed_core.terminal.quiet import quieten

    quieten()
    try:
        environment.translate_slurm(os.environ)
        launch = start.wanted(arguments)
        if launch is not None and "--plan-only" not in arguments:
            return start.launch(arguments, launch, _train)
        worker.attach()
        from mindspeed_core.activation import prepare

        session = prepare(arguments, host="standalone")
        if session.args.plan_only:
            return _print_plan(arguments)
        with session:
            from mindspeed_core.hosts.standalone.loop import train

            train(session)
    except KeyboardInterrupt:
        if not worker.supervised():
            print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return report(error)
    return 0


def _print_plan(arguments: Sequence[str]) -> int:
    from mindspeed_core.cli.features import main as features

    kept = [argument for argument in arguments if argument != "--plan-only"]
    return features(["plan", "--", *kept])
