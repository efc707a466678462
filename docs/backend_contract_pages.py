"""The page of communication backends: the rules of HCCL and NCCL that gloo does not have."""

from __future__ import annotations

from tables import code, codes, table

from mindspeed_megatron.backend_contracts.contract import BackendContract
from mindspeed_megatron.backend_contracts.hccl import HCCL
from mindspeed_megatron.backend_contracts.nccl import NCCL

INTRODUCTION = (
    "# Rules of communication backends",
    "",
    "gloo takes nearly every call; the backends of devices do not. These rules are held in every proof, "
    "whatever backend serves it (`mindspeed-features verify`), on the [value device](../npu-conformance.md) "
    "and in [dry runs](../dry-runs.md) of the platforms `fake-npu` and `fake-cuda`. They were read, not "
    "measured.",
)


def backend_contracts_page() -> str:
    """Dtypes and reductions of each backend, the order in which calls are served, buffers, sources."""
    contracts = [*HCCL.values(), NCCL]
    lines = [*INTRODUCTION, "", "## Dtypes", ""]
    lines += table(
        (
            "backend",
            "moved",
            "summed, largest, smallest",
            "multiplied",
            "averaged",
            "converted to int32 first",
        ),
        (
            (
                code(one.name),
                codes(sorted(one.moved)),
                codes(sorted(one.reduced["SUM"])),
                codes(sorted(one.reduced["PRODUCT"])),
                codes(sorted(_averaged(one))),
                codes(sorted(one.widened)) or "none",
            )
            for one in contracts
        ),
    )
    lines += [
        "",
        "There are no bitwise reductions. What is converted is converted by `all_reduce` and `reduce`, not "
        "by `reduce_scatter`. Every tensor is contiguous, and what is reduced begins in memory at a multiple "
        "of the size of one of its numbers. A device that is not known is held to the rules of 910B, and "
        "messages say so.",
        "",
        "## Layouts",
        "",
        "One dtype travels in a call. What is gathered, or scattered, has as many numbers as all ranks have "
        "together; lists have a tensor for each rank; those of `gather` have one shape. `all_to_all_single` "
        "without split sizes wants rows that the ranks divide, and no tensor without dimensions; split sizes "
        "are one for each rank, may be 0, and add up to the rows. A receive names its sender. Tensors that "
        "have no elements travel.",
        "",
        "## Objects",
        "",
        "`all_gather_object` and its like travel as numbers over the device that the group's backend serves "
        "(the process's current one, so that it has to be chosen before), and the host waits for their "
        "length. In a group of gloo they stay on the host.",
        "",
        "## Order",
        "",
        "Collectives of a group, and batches of messages in it, share one stream. Messages outside of a "
        "batch (`isend`, `irecv`) share a stream for each pair of ranks in the group, both directions "
        "together. A stream begins a call when the one before has ended, and a send ends when its receive "
        "is reached. A message of a batch does not meet one outside of a batch.",
        "",
        "Collectives of all groups of a rank share its device: they begin in one order on all ranks, also in "
        "circles of three groups. The first call of a group, or of a pair of ranks outside of batches, makes "
        "a communicator, and the host waits there for all its ranks. Where that happens behind a collective "
        "that is under way, nothing is hidden in the first step: [plans](../planning.md) name such calls.",
        "",
        "## Buffers",
        "",
        "A communicator takes device memory at its first call, beside every tensor:",
        "",
        *table(
            ("backend", "of a group", "of a pair of ranks outside of batches"),
            ((code(one.name), _size(one.buffer_bytes), _size(one.pair_buffer_bytes)) for one in contracts),
        ),
        "",
        "`HCCL_BUFFSIZE` and `P2P_HCCL_BUFFSIZE` change it, and [plans](../planning.md) read them.",
        "",
        "## Sources",
        "",
        *table(
            ("rule", "HCCL", "NCCL"),
            ((kind, HCCL["910B"].sources[kind], NCCL.sources[kind]) for kind in NCCL.sources),
        ),
    ]
    return "\n".join(lines)


def _averaged(contract: BackendContract) -> frozenset[str]:
    found = contract.reduced["AVG"]
    return found if contract.integer_average else frozenset(name for name in found if "float" in name)


def _size(count: int) -> str:
    return f"{count / 2**20:.0f} MiB" if count else "chosen by the backend"
