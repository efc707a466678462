"""Rules of communication backends, as data: what HCCL and NCCL refuse although gloo takes it.

`tensor_facts` describes one call, `contract` holds it against rules, `layouts` asks whether its tensors fit
together, `hccl` and `nccl` are the rules with the sources they were read from. `rendezvous` plays the calls
of several ranks in the order in which such a backend serves them.
Instruments and dry runs enforce them, so that a launch is refused before it is started.
"""

from mindspeed_megatron.backend_contracts.contract import BackendContract, BackendRefusal
from mindspeed_megatron.backend_contracts.tensor_facts import CollectiveCall, TensorFacts

__all__ = ["BackendContract", "BackendRefusal", "CollectiveCall", "TensorFacts"]
