"""Evaluations of worlds: a model under a layout, asked by the leader while the others follow."""

from __future__ import annotations

import contextlib
import io
import socket
from pathlib import Path
from typing import Any


def without_network() -> None:
    """Let connections to other machines fail in this process."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a connection to {address}")
        connect(self, address)

    socket.socket.connect = guarded  # type: ignore[method-assign, assignment]


def evaluated(folder: str, root: str, options: dict[str, Any], tokens: int) -> dict[str, list[Any]] | None:
    """Evaluate all seven tasks; returns the answers to each question by task, on the leader."""
    from benchmark_files import ALL

    from mindspeed_models.evaluation.answers import AnswerLog
    from mindspeed_models.evaluation.engine import evaluate, load_questions
    from mindspeed_models.evaluation.items import TaskOptions
    from mindspeed_models.evaluation.tasks import TASKS
    from mindspeed_models.inference.model import load
    from mindspeed_models.serving.prompts import load_prompts

    without_network()
    with load(folder, **options) as model:
        if not model.leader:
            model.follow()
            return None
        task_options = TaskOptions(new_tokens=tokens, run=lambda program: (False, ""))
        asked = [load_questions(TASKS[name], ALL[name](Path(root)), task_options) for name in ALL]
        with AnswerLog(None, "") as log:
            results = evaluate(model, load_prompts(model, folder, None), asked, log)
        assert all(result.errors == result.truncated == 0 for result in results)
        return {
            result.questions.task.name: [list(sample.answers) for sample in result.samples]
            for result in results
        }


def command(line: list[str], seed: bool = False) -> tuple[int, str, str]:
    """Run a line of ``mindspeed-models``, or of the seed's script; returns status, output and messages."""
    from mindspeed_models.evaluation.command import main_of_seed
    from mindspeed_models.program import main

    output, messages = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(messages):
        status = (main_of_seed if seed else main)(line)
    return status, output.getvalue(), messages.getvalue()
