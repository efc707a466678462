"""Settings that make runs deterministic, until a session closes."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_kernels.ops.choice import restore, set_choices

if TYPE_CHECKING:
    from mindspeed_core.session import Session

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    "cpu": {},
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"},
    "npu": {"HCCL_DETERMINISTIC": "True", "LCCL_DETERMINISTIC": "1", "CLOSE_MATMUL_K_SHIFT": "1"},
}
"""Variables per kind of platform; libraries read them when the first communicator or handle is made."""


def set_environment(session: Session) -> None:
    """Set what libraries read at their start; what the user has set stays."""
    for kind in session.platform.kinds() & ENVIRONMENT.keys():
        for name, value in ENVIRONMENT[kind].items():
            if name not in os.environ:
                session.setenv(name, value)
    if "PYTHONHASHSEED" not in os.environ:
        logger.info(
            "PYTHONHASHSEED is not set; a data pipeline that hashes texts differs between runs unless the "
            "program is started with it: PYTHONHASHSEED=0 mindspeed-train ..."
        )


def only_repeatable(session: Session, owner: str) -> None:
    """Let torch and the operators use what gives the same bits, or raise where there is nothing."""
    before: list[Any] = []
    memory: Any = torch.utils.deterministic

    def change() -> None:
        before.append(
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                memory.fill_uninitialized_memory,
                torch.backends.cudnn.benchmark,
                set_choices(deterministic=True),
            )
        )
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory finds mistakes in kernels and costs time; it changes no result.
        memory.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False

    def undo() -> None:
        enabled, warns, fills, benchmark, choices = before.pop()
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        memory.fill_uninitialized_memory = fills
        torch.backends.cudnn.benchmark = benchmark
        restore(choices)

    session.ledger.setting(
        "torch:use_deterministic_algorithms", change, undo, owner=owner, reason="two runs give the same bits"
    )
