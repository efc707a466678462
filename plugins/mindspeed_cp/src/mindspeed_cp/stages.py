"""The stages that this package publishes; features of other packages implement them like the core's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.hooks import hookspec

if TYPE_CHECKING:
    from mindspeed_core.run import Batch, Run
    from mindspeed_core.session import Session
    from mindspeed_cp.engine.masks import MaskRule

__all__ = ["cp_mask_rule"]


@hookspec(firstresult=True)
def cp_mask_rule(session: Session, run: Run, batch: Batch) -> Sequence[MaskRule] | Any:
    """Return what the queries of a micro-batch see: one rule for each sample, or one for all.

    Called before the micro-batch is split, on every rank; all ranks of a sequence must answer the same. A
    rule says everything: whether queries see later keys, documents, a prefix, a matrix. With
    ``--adaptive-cp-manually-set-mask-list`` the first answer stays for the run, unless
    ``--adaptive-cp-dynamic-attn-mask`` asks anew for every micro-batch.

    Args:
        session: the open session.
        run: the run.
        batch: the whole sequences: tokens ``[b, s]`` and positions ``[b, s]``, on every pipeline stage.
    """
