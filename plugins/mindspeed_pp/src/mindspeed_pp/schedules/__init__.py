"""The built-in schedules, one module for each idea."""

from __future__ import annotations

from mindspeed_pp.schedules.chimera import chimera
from mindspeed_pp.schedules.dual_pipe_v import dual_pipe_v
from mindspeed_pp.schedules.fold import fold_aiao, fold_fifo
from mindspeed_pp.schedules.interleaved import interleaved, nanopipe, one_forward_one_backward
from mindspeed_pp.schedules.list_scheduler import list_scheduler
from mindspeed_pp.schedules.zero_bubble import zb_h1, zb_h2, zbi
from mindspeed_pp.schedules.zero_bubble_v import zbv

BUILT_IN = (
    one_forward_one_backward,
    interleaved,
    zb_h1,
    zb_h2,
    zbi,
    zbv,
    nanopipe,
    dual_pipe_v,
    chimera,
    fold_aiao,
    fold_fifo,
    list_scheduler,
)
