"""From the arguments to the values of megatron-core's configuration classes, field by field."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields
from typing import Any

import torch

from mindspeed_megatron.config_flags import dest_of

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
# One word on the command line is the value itself, as in Megatron-LM; several are a list.
_ONE_OR_MORE = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "cp_comm_type")
# Not given means None here, and not the default of the class.
_NONE_IS_A_VALUE = ("q_lora_rank",)


def config_values(kind: type[Any], args: Namespace) -> dict[str, Any]:
    """Return the values of the fields of a configuration class that the arguments know.

    A value that was not given is left out, so that the class keeps its own default.
    """
    values: dict[str, Any] = {}
    for field in fields(kind):
        # Arguments that a feature adds are named like the field, whatever Megatron-LM calls its flag.
        dest = field.name if hasattr(args, field.name) else dest_of(field.name)
        if not field.init or not hasattr(args, dest):
            continue
        value = getattr(args, dest)
        if value is None and field.name not in _NONE_IS_A_VALUE:
            continue
        values[field.name] = _converted(field.name, value)
    return values


def _converted(name: str, value: Any) -> Any:
    if name in _ONE_OR_MORE and isinstance(value, (list, tuple)) and len(value) == 1:
        return value[0]
    if name.endswith("_dtype") and isinstance(value, str) and value in _DTYPES and name != "moe_router_dtype":
        return _DTYPES[value]
    if name == "attention_backend" and isinstance(value, str):
        from megatron.core.transformer.enums import AttnBackend

        return AttnBackend[value]
    return value
