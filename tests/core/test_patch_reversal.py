"""Patches of the cpu platform are taken back exactly, whether megatron or the session came first."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = r"""
import importlib, sys, types, warnings
warnings.simplefilter("ignore")
order = sys.argv[1]
import torch, torch._dynamo
from mindspeed_core.runtime.patches import PatchLedger
from mindspeed_core.platforms.cpu import CpuPlatform
import mindspeed_megatron.devices.cuda_calls, mindspeed_megatron.devices.device_arguments

def load_megatron():
    for name in ("models.gpt.gpt_model", "models.gpt.gpt_layer_specs", "optimizer", "distributed",
                 "pipeline_parallel.schedules", "transformer.moe.moe_layer", "dist_checkpointing"):
        importlib.import_module("megatron.core." + name)

def snapshot():
    found = {}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or name.partition(".")[0] not in ("torch", "megatron"):
            continue
        for key, value in list(types.ModuleType.__getattribute__(module, "__dict__").items()):
            found[name, key] = value
            if isinstance(value, type) and str(value.__module__).partition(".")[0] in ("torch", "megatron"):
                for attribute, raw in list(vars(value).items()):
                    found[name, key, attribute] = raw
    return found

if order == "before":
    load_megatron()
CpuPlatform().patches()
before = snapshot()
ledger = PatchLedger()
session = types.SimpleNamespace(args=types.SimpleNamespace(), ledger=ledger)
platform = CpuPlatform()
ledger.apply(platform.patches(), owner="cpu")
platform.open(session)
assert torch.empty(1, device="cuda").device.type == "cpu"
opened = snapshot()
patched = {id(value) for entry in ledger._entries for value in getattr(entry, "made", ()) if callable(value)}
touched = [key for key in before if id(opened.get(key)) in patched]
load_megatron()
from torch.cuda.nvtx import range_push
late = types.ModuleType("late")
late.range_push, late.zeros = range_push, torch.zeros
sys.modules["late"] = late
ledger.revert()
after = snapshot()
# Importing megatron changes settings of torch by itself, so all of torch can be compared only without.
compared = before if order == "before" else touched
different = [key for key in compared if after.get(key) is not before[key]]
assert not different, different[:20]
leaked = [key for key, value in after.items() if id(value) in patched]
assert not leaked, leaked[:20]
assert late.range_push is torch.cuda.nvtx.range_push and late.zeros is torch.zeros
assert not [name for name in ("cuda", "to", "type", "new_zeros", "pin_memory") if name in vars(torch.Tensor)]
assert "te_general_gemm" not in vars(sys.modules["megatron.core.transformer.moe.moe_utils"])
assert len(touched) > 60, len(touched)
print("restored", len(before))
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_everything_is_restored(order, tmp_path):
    script = tmp_path / "reversal.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), order], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("restored")
