"""Block kernels: attention of some rows to some keys on each kind of device, and the choice among them.

The contract is in `mindspeed_cp.engine.kernels.contract`. Other packages add kernels of their own through the
entry-point group ``mindspeed_cp.block_kernels``.
"""

from mindspeed_cp.engine.kernels.choice import add_kernel, kernel_for, known_kernels, using
from mindspeed_cp.engine.kernels.contract import BackwardBlock, BlockKernel, Case

__all__ = ["BackwardBlock", "BlockKernel", "Case", "add_kernel", "kernel_for", "known_kernels", "using"]
