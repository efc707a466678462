"""SwiGLU as the activation module of megatron-core's MLP, and its placement.

megatron-core builds ``MLPSubmodules.activation_func`` only when ``use_te_activation_func`` is set; despite
its name the switch concerns any class built as ``cls(config=...)`` that takes the whole output of fc1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mindspeed_kernels.ops import swiglu
from mindspeed_megatron.layer_spec import SpecEditor

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.session import Session


class FusedSwiGLU(MegatronModule):
    """``silu(a) * b`` with the halves ``[a | b]`` of the output of fc1, bias included.

    Every tensor-parallel rank holds matching parts of both halves, so nothing is communicated.
    """

    def __init__(self, config: TransformerConfig) -> None:
        """Check that nothing is asked for that the operator does not compute.

        Raises:
            ValueError: the gate is clamped or offset, or its input is to be kept in FP8.
        """
        super().__init__(config=config)
        options = {
            "activation_func_clamp_value": None,
            "glu_linear_offset": 0.0,
            "activation_func_fp8_input_store": False,
        }
        for name, plain in options.items():
            value = getattr(config, name, plain)
            if value != plain:
                raise ValueError(f"--use-fused-swiglu computes plain SwiGLU, but {name} is {value}; drop one")

    def forward(self, intermediate: Tensor) -> Tensor:
        """Activate ``[..., 2 f]``; returns ``[..., f]``."""
        return swiglu(intermediate)


def use_activation_modules(config: Any) -> Any:
    """Make megatron-core's MLP build its activation from the specification."""
    config.use_te_activation_func = True
    config.bias_activation_fusion = False
    return config


def place_swiglu(session: Session, spec: Any) -> Any:
    """Return the tree with `FusedSwiGLU` in every MLP, dense, expert and shared."""
    editor = SpecEditor(spec, owner="fused-swiglu", session=session)
    editor.replace("activation", FusedSwiGLU, empty=True)
    return editor.spec
