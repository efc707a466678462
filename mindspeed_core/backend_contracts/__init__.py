"""Rules of communication backends, as data: what HCCL and NCCL refuse although gloo takes it.

`contract` holds the types and the check of one call, `hccl` and `nccl` the rules with the sources they were
read from, `rendezvous` plays the calls of several ranks in the order in which such a backend serves them.
Instruments and dry runs enforce them, so that a launch is refused before it is started.
"""

from mindspeed_core.backend_contracts.contract import (
    BackendContract,
    BackendRefusal,
    CollectiveCall,
    TensorFacts,
)

__all__ = ["BackendContract", "BackendRefusal", "CollectiveCall", "TensorFacts"]
