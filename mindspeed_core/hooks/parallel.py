"""Stages that bring up the distributed backend, the process groups and the random number generators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mindspeed_core.hooks.marker import hookspec

if TYPE_CHECKING:
    from argparse import Namespace

    from megatron.core.process_groups_config import ProcessGroupCollection

    from mindspeed_core.platforms.platform import Platform
    from mindspeed_core.run import DistInfo, RngInfo
    from mindspeed_core.session import Session

__all__ = ["build_process_groups", "init_distributed", "process_group_options", "seed_everything"]


@hookspec
def init_distributed(session: Session, args: Namespace, platform: Platform) -> DistInfo | Any:
    """Start ``torch.distributed`` on the platform's backend and select this rank's device.

    After the default has run, the core compares plan, versions and arguments of all ranks.

    Args:
        platform: the device platform.
    """


@hookspec(since="1.2")
def process_group_options(session: Session, args: Namespace) -> Mapping[str, Any] | Any:
    """Return further options of megatron-core's ``initialize_model_parallel``; the default gives none.

    For groups that megatron-core builds itself, such as the ranks that hold the word embedding
    (``get_embedding_ranks``). A wrapper adds to the mapping. In a library session the caller builds these
    groups.
    """


@hookspec
def build_process_groups(
    session: Session, args: Namespace, dist_info: DistInfo
) -> ProcessGroupCollection | Any:
    """Build the process groups of the model's parallelism.

    A feature that needs groups of its own wraps this stage and, after its ``yield``, calls
    ``session.groups.create("cp.ring", ranks_per_group)`` with the same list on every rank; code finds the
    group as ``session.groups["cp.ring"]``. Groups end with the session; a library session leaves them to the
    next one of its process.

    Args:
        dist_info: the result of `init_distributed`.

    Returns:
        The groups megatron-core's modules take as ``pg_collection``.
    """


@hookspec
def seed_everything(session: Session, args: Namespace, pg: ProcessGroupCollection) -> RngInfo | Any:
    """Seed Python, NumPy, torch and megatron-core's tensor-parallel generators.

    May be called again to re-seed, for instance after weights were built with another layout.
    """
