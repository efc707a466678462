"""HCCL's rules, by generation of devices, as torch_npu and HCCL's documentation state them.

Read from torch_npu's ``ProcessGroupHCCL.cpp`` of the branches v2.6.0 to v2.10.0 and of its main branch of
August 2026, which agree where no build is named, and from the reference of HCCL for CANN 8.1 to 9.0.
"""

from __future__ import annotations

import os
from dataclasses import replace

from mindspeed_megatron.backend_contracts.contract import BackendContract
from mindspeed_megatron.devices.ascend_generations import generation_of

_CHECKED = "torch_npu ProcessGroupHCCL.cpp, checkSupportedDataType; HCCL reference, HcclAllReduce"
_SOURCES = {
    "moved": "torch_npu HCCLUtils.cpp, kScalarTypeToHcclDataType",
    "reduced": _CHECKED,
    "contiguous": "torch_npu ProcessGroupHCCL.cpp, check_npu_tensors_different_devices",
    # Of what reduces; the reference asks it of nothing else.
    "aligned": "HCCL reference of CANN 9.1, constraints of HcclAllReduce, HcclReduce and HcclReduceScatter",
    "parts": "torch_npu ProcessGroupHCCL.cpp, alltoall_base",
    "layouts": "torch_npu ProcessGroupHCCL.cpp, check_split_sizes, alltoall, _allgather_base, recvAnysource",
    "objects": "torch distributed_c10d.py, _get_object_coll_device",
    "creation": "torch_npu ProcessGroupHCCL.cpp, getHCCLComm; HCCL reference, HcclCommInitRootInfo",
    "order": "torch_npu ProcessGroupHCCL.cpp, pointToPoint and getKeySendRecv; HCCL reference, HcclSend",
    "buffers": "CANN environment variables HCCL_BUFFSIZE and P2P_HCCL_BUFFSIZE",
}
_MOVED = frozenset(
    "uint8 int8 int16 int32 int64 uint16 uint32 uint64 bool float16 bfloat16 float32 float64 "
    "float8_e4m3fn float8_e5m2".split()
)
_REDUCED = frozenset("int8 int16 int32 int64 float16 bfloat16 float32".split())
_MIB = 1 << 20
HCCL_BUFFSIZE = 200 * _MIB
"""Default of ``HCCL_BUFFSIZE``; a communicator takes it once for input and once for output."""
P2P_HCCL_BUFFSIZE = 20 * _MIB
"""Default of ``P2P_HCCL_BUFFSIZE``, of the communicator of two ranks."""


def _contract(generation: str, reduced: frozenset[str]) -> BackendContract:
    # Products of 16-bit integers and bfloat16 are not computed on any generation.
    products = reduced - {"int16", "bfloat16"}
    reductions = dict.fromkeys(("SUM", "MAX", "MIN", "AVG"), reduced)
    # torch_npu multiplies before it sums.
    floating = frozenset(name for name in reduced if "float" in name)
    return BackendContract(
        backend="hccl",
        generation=generation,
        moved=_MOVED,
        reduced={**reductions, "PRODUCT": products, "PREMUL_SUM": floating},
        widened=frozenset({"bool", "uint8"}),
        # Only from the 950 on does torch_npu truncate; before, dividing an integer in place raises.
        integer_average=generation == "950",
        buffer_bytes=2 * HCCL_BUFFSIZE,
        pair_buffer_bytes=2 * P2P_HCCL_BUFFSIZE,
        sources=_SOURCES,
    )


HCCL = {
    "910B": _contract("910B", _REDUCED),
    "910_93": _contract("910_93", _REDUCED),
    "950": _contract("950", _REDUCED | {"uint64", "float64"}),
}
"""Contracts by generation: 910B is Atlas A2, 910_93 is Atlas A3."""

_NARROWEST = "910B"


def contract_for(device: str) -> BackendContract:
    """Return the contract of a device by its name, with the buffers that the environment asks for.

    Args:
        device: as the runtime names it, ``Ascend910B1``. A device without rules of its own is held to those
            of 910B, which are the narrowest; the contract's name says so.
    """
    found = HCCL.get(generation_of(device))
    return replace(
        found or HCCL[_NARROWEST],
        assumed_for="" if found else device,
        buffer_bytes=2 * _asked("HCCL_BUFFSIZE", HCCL_BUFFSIZE),
        pair_buffer_bytes=2 * _asked("P2P_HCCL_BUFFSIZE", P2P_HCCL_BUFFSIZE),
    )


def _asked(variable: str, default: int) -> int:
    """Return a size that a variable gives in MiB."""
    value = os.environ.get(variable, "")
    return int(value) * _MIB if value.isdigit() else default
