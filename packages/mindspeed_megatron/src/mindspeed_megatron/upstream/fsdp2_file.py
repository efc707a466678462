"""``--fsdp2-config-path``: MindSpeed's file of options for torch's FSDP2, read as flags.

What such a file says of groups, of modules that are gathered together and of prefetching changes where
parameters are and when they travel, and no number. What would change numbers is refused by its key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_megatron.upstream.given import ChangesNothing, Given, Line, Outcome, Refused, Translated
from mindspeed_megatron.upstream.yaml_file import read_mapping

_SAME_NUMBERS = frozenset(
    "sharding_size sub_modules_to_wrap recompute_modules use_reentrant num_to_forward_prefetch "
    "num_to_backward_prefetch pin_memory".split()
)
_NOTHING: tuple[object, ...] = (None, False, [], "")


def fsdp2_file(given: Given, line: Line) -> Outcome:
    """Read the file and judge its keys."""
    if not line.has("--use-torch-fsdp2"):
        return ChangesNothing("it is read with --use-torch-fsdp2 alone")
    name = given.words[0] if len(given.words) == 1 else ""
    try:
        content = read_mapping(Path(name))
    except UserError as error:
        return Refused(str(error), "name a YAML file of options, or leave it out")
    for key, value in content.items():
        wrong = _problem(str(key), value, line)
        if wrong:
            return Refused(f"{name}: {key}: {value!r} {wrong[0]}", wrong[1])
    because = "torch shards over all data-parallel ranks, layer by layer; no number depends on it"
    if content.get("recompute_modules"):
        because += ", nor on recompute_modules, whose counterpart is --recompute-granularity full"
    if content.get("reshard_after_forward") is False:
        return Translated(("--torch-fsdp2-no-reshard-after-forward",), because)
    return ChangesNothing(because)


def _problem(key: str, value: Any, line: Line) -> tuple[str, str] | None:
    """Return why a key cannot be honoured and the way out; None where it can."""
    if key in _SAME_NUMBERS:
        return None
    if key == "reshard_after_forward":
        return None if isinstance(value, bool) else ("is a number of ranks", "write true or false")
    if key in ("ignored_modules", "offload_to_cpu"):
        reasons = {
            "ignored_modules": (
                "would leave parameters out of sharding and of gradient reduction",
                "remove it",
            ),
            "offload_to_cpu": ("would keep parameters on the host", "use the features of mindspeed-memory"),
        }
        return None if value in _NOTHING else reasons[key]
    if key in ("param_dtype", "reduce_dtype", "output_dtype"):
        own = "bf16" if line.has("--bf16") else "fp16" if line.has("--fp16") else "fp32"
        if value in (None, own):
            return None
        return (f"differs from {own}, in which this run computes and reduces", f"write {own}, or remove it")
    if key == "cast_forward_inputs":
        # Inputs of the model are whole numbers, and layers hand on what they compute in.
        return None
    return ("is no option that is known", "remove it")
