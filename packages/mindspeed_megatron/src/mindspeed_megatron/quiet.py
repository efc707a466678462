"""Filters for log messages: foreign text in ours, warnings of megatron-core and torch that nobody can act on.

Only programs do this; a library session leaves warnings and logging as its host process set them.
"""

from __future__ import annotations

import logging
import os
import warnings

from mindspeed_core.terminal.foreign_text import clean
from mindspeed_core.terminal.listing import print_message

_REPETITIVE = (
    # Said by every module that would use them; a run on CUDA says it once, and `doctor` explains it.
    (UserWarning, r".*(Transformer Engine and Apex are|Apex is) not installed"),
    (UserWarning, r"full scope is deprecated"),
    # megatron-core looks at .grad of its own non-leaf main parameters.
    (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf"),
    (FutureWarning, r"Please use DTensor instead"),
    (FutureWarning, r"`load_state_dict` is deprecated"),
    (FutureWarning, r".*torch\.distributed\.\w+` is deprecated"),
)


class CleanLog(logging.Filter):
    """Filter of a logger that cleans its messages."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Put the cleaned message in the place of the message and its arguments."""
        record.msg, record.args = clean(record.getMessage(), lines=True), ()
        return True


def clean_log() -> None:
    """Let the project's logger show cleaned messages; once is enough."""
    logger = logging.getLogger("mindspeed_core")
    if not any(isinstance(each, CleanLog) for each in logger.filters):
        logger.addFilter(CleanLog())


class SeverityHandler(logging.Handler):
    """Log messages on standard error behind their severity, as programs print their own.

    For loggers that nobody has configured: in place of Python's last resort, which prints messages alone.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        severity = "error" if record.levelno >= logging.ERROR else "warning"
        try:
            text = self.format(record)
            print_message(f"{severity}: {text.removeprefix(f'{severity}: ')}")
        except Exception:
            self.handleError(record)


def quieten() -> None:
    """Ignore known warnings, raise megatron-core's loggers to level ERROR, and clean messages of our own."""
    clean_log()
    logging.lastResort = SeverityHandler(logging.WARNING)
    # c10d warns of every connection that closes, with a C++ stack; what follows from it is said once, here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for category, pattern in _REPETITIVE:
        warnings.filterwarnings("ignore", pattern, category)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # A writer's error comes back to the save, which says it once, with the file and the way out.
    writers = "megatron.core.dist_checkpointing.strategies.filesystem_async"
    logging.getLogger(writers).setLevel(logging.CRITICAL)
