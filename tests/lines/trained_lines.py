"""Train generated command lines that pass validation for a step each; prints what is wrong as JSON.

Small models alone, and sizes that nothing can hold: those have to be refused before anything is allocated.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import io
import json
import logging
import os
import signal
import sys
import tempfile
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any

from command_lines import CommandLines, tokens

from mindspeed_core import Registry, check, prepare
from mindspeed_core.discovery.entry_points import load_object
from mindspeed_core.errors import ArgumentError
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.terminal.errors import EXPLAINED
from mindspeed_train.arguments.run_length import samples_wanted
from mindspeed_train.arguments.sizes import check_index_fits
from mindspeed_train.setup import teardown

SECONDS = 60
_SMALL = {
    "num_layers": 8,
    "hidden_size": 128,
    "seq_length": 256,
    "padded_vocab_size": 4096,
    "ffn_hidden_size": 4096,
    "moe_ffn_hidden_size": 4096,
    "micro_batch_size": 8,
    "global_batch_size": 16,
    "train_iters": 3,
    "eval_iters": 2,
    "num_attention_heads": 64,
    "kv_channels": 512,
    "num_experts": 16,
    "max_position_embeddings": 4096,
    "num_workers": 2,
    "mtp_num_layers": 2,
}
_HUGE = 10**9
_MOST_SAMPLES = 10**7
"""Samples whose index is made in no time."""


class TooSlow(BaseException):
    """A training of one step took longer than `SECONDS`."""


def _too_slow(*_: Any) -> None:
    raise TooSlow


def worth_training(args: Namespace) -> bool:
    """Return whether a step takes no time, or a size is out of all proportion."""
    for name, most in _SMALL.items():
        size = getattr(args, name, None) or 0
        if most < size < _HUGE:
            return False
    if any(count is None or count > _MOST_SAMPLES for count in samples_wanted(args)):
        with contextlib.suppress(ArgumentError):
            # It has memory for the index, and takes minutes to fill it: nothing wrong.
            check_index_fits(args, samples_wanted(args))
            return False
    return not args.nproc and (not args.eval_iters or args.train_iters // args.eval_interval < 5)


def trained(words: list[str], registry: Registry) -> str:
    """Train a step; return what is wrong with how it went, nothing where all is well."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            session = prepare(words, host="standalone", registry=registry)
            with session:
                try:
                    load_object(session.host.train)(session)
                finally:
                    teardown(session)
    except TooSlow:
        return f"takes longer than {SECONDS} s: {traceback.format_exc(limit=-4)}"
    except EXPLAINED as error:
        text = str(error).replace("\n", " ")
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        named = any(option in text for option in options)
        return (
            ""
            if named and any(sign in text for sign in (";", "->", ". Drop "))
            else f"explains too little: {text}"
        )
    except BaseException:
        return traceback.format_exc(limit=-4)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        # A model is part of cycles; the collector is in no hurry, and the next model comes at once.
        gc.collect()
    return ""


def main() -> None:
    """Train the lines ``first`` to ``last`` of those that pass validation."""
    parser = argparse.ArgumentParser()
    for name in ("first", "last", "seed"):
        parser.add_argument(name, type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGALRM, _too_slow)
    registry = Registry.discover()
    # The test plugins' features are sketches of needs, not features of trainings.
    flags = [entry.flag for entry in flag_set(registry).entries if not entry.owner.startswith("toy")]
    lines = CommandLines(flags, options.folder / "places", options.seed)
    # Deep enough for every path with dots in it.
    deep = options.folder / "a" / "b" / "c"
    deep.mkdir(parents=True)
    os.chdir(deep)
    wrong, index, count = [], 0, 0
    while count < options.last:
        index += 1
        words = tokens(lines.line(index))
        checked = check(words, registry=registry)
        if not checked.ok or checked.args is None or not worth_training(checked.args):
            continue
        count += 1
        words += ["--run-dir", tempfile.mkdtemp(dir=options.folder)]
        text = trained(words, registry)
        if text:
            wrong.append({"index": index, "line": words, "found": text})
    json.dump({"wrong": wrong, "trained": count}, sys.stdout)


if __name__ == "__main__":
    main()
