"""NCCL's rules, as torch's ``ProcessGroupNCCL.cpp`` and NCCL's documentation state them."""

from __future__ import annotations

from mindspeed_megatron.backend_contracts.contract import BackendContract

_MOVED = frozenset(
    "uint8 int8 int32 int64 bool float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2".split()
)
_REDUCED = _MOVED - {"float8_e4m3fn", "float8_e5m2"}
_MIB = 1 << 20

NCCL = BackendContract(
    backend="nccl",
    generation="",
    moved=_MOVED,
    reduced={
        **dict.fromkeys(("SUM", "PRODUCT", "MAX", "MIN"), _REDUCED),
        "AVG": _REDUCED - {"bool"},
        "PREMUL_SUM": frozenset({"float16", "bfloat16", "float32", "float64"}),
    },
    # NCCL_BUFFSIZE is 4 MiB a channel; what a communicator takes depends on its channels, which NCCL chooses.
    buffer_bytes=0,
    pair_buffer_bytes=0,
    sources={
        "moved": "torch NCCLUtils.hpp, getNcclDataType",
        "reduced": "torch ProcessGroupNCCL.cpp, getNcclReduceOp; NCCL user guide, ncclRedOp_t",
        "contiguous": "torch ProcessGroupNCCL.cpp, check_gpu_single_tensor",
        # Of what reduces; NCCL moves bytes everywhere else (enqueue.cc).
        "aligned": "NCCL 2.30.7, src/device: prims_ll.h, prims_ll128.h and op128.h load whole numbers",
        "parts": "torch ProcessGroupNCCL.cpp, alltoall_base",
        "layouts": "torch c10d Utils.hpp, checkSplitSizes; ProcessGroupNCCL.cpp, _allgather_base, gather",
        "objects": "torch distributed_c10d.py, _get_object_coll_device",
        "creation": "torch ProcessGroupNCCL.cpp, initNCCLComm; NCCL user guide, ncclCommInitRank",
        "order": "torch ProcessGroupNCCL.cpp, pointToPoint; NCCL user guide, point-to-point communication",
        "buffers": "NCCL user guide, NCCL_BUFFSIZE",
    },
)
"""The contract of NCCL, for all devices."""
