"""Megatron-LM's own training loop from a checkout, as a part that takes turns.

Runs the checkout's ``pretrain_gpt.py`` in one process on CPU, with the emulation that comparing
losses in ``tests/megatron_lm`` uses.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from turns import Part, Turns

EMULATION = Path(__file__).resolve().parent.parent / "tests" / "megatron_lm"
# Flags of this host that Megatron-LM does not have, with the number of their values.
_OURS = {"--platform": 1, "--no-progress": 0}
_THEIRS = (
    "--transformer-impl local --tokenizer-type NullTokenizer --distributed-backend gloo "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion "
    "--no-create-attention-mask-in-dataloader --eval-interval 1000000"
).split()


def flags_for(given: Sequence[str]) -> list[str]:
    """The host's command line as Megatron-LM takes it."""
    kept: list[str] = []
    skip = 0
    for word in given:
        if skip:
            skip -= 1
        elif word in _OURS:
            skip = _OURS[word]
        else:
            kept.append(word)
    length = kept[kept.index("--seq-length") + 1]
    return [*kept, *_THEIRS, "--max-position-embeddings", length]


def part(steps: int, given: Sequence[str]) -> Part:
    """The checkout's training as a part; ``MEGATRON_LM_PYTHON`` runs it, or this interpreter."""
    sys.path.insert(0, str(EMULATION))
    from parity import environment_for

    interpreter = os.environ.get("MEGATRON_LM_PYTHON", sys.executable)
    return Part(
        "megatron_lm_loop:by_megatron_lm", (steps, given), interpreter, environment_for(Path(interpreter))
    )


def by_megatron_lm(turns: Turns, steps: int, given: Sequence[str]) -> None:
    """Train with the checkout that ``MEGATRON_LM_PATH`` names; a turn is one whole iteration of its loop."""
    sys.path.insert(0, str(EMULATION))
    import emulated_rank

    def taking_turns(step: Callable[..., Any], numbers: Path) -> Callable[..., Any]:
        def train_step(*arguments: Any, **options: Any) -> Any:
            turns.wait()
            return step(*arguments, **options)

        return train_step

    emulated_rank.recorded = taking_turns
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["pretrain_gpt.py", folder, *flags_for(given), "--train-iters", str(steps)]
        with (Path(folder) / "log").open("w") as log, redirect_stdout(log):
            emulated_rank.main()
    turns.finish()
