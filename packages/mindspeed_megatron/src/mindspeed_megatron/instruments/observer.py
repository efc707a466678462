"""Modes that only look on: a training step that one of them follows trains what it trains alone.

Under any other dispatch mode ``torch.compile`` runs its functions eagerly, and may do so behind it too:
compiled dropout draws other masks than eager dropout, and fused activations round otherwise. Under an
observer they are compiled and run as ever; it sees their results when another operation takes them.
"""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Observer(TorchDispatchMode):
    """Looks at operations and changes nothing; what compiled functions do inside stays out of its sight.

    A torch without this (`mindspeed_megatron.instruments.compiled_functions`) runs them eagerly all the same.

    Beside another mode this one is named first: ``class StorageTracker(Observer, TensorBytes)``. A mode that
    has to see every operation, to change or to answer it, is none.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Answer torch's compiler that it may compile."""
        return True
