"""``python -m mindspeed_kernels.first_run --out FILE``: what only a real NPU can show, in the order of risk.

Each check compares a call on the device with the same call by the reference on the host. Behind them comes
how fast the device is (`mindspeed_kernels.device_measurements`). The file is written after every check, so
that it also tells which one ended the process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_megatron.broken_packages import take_broken_as_absent
from mindspeed_megatron.devices.cann import hold_back_torch_npu, libraries_missing

if __name__ == "__main__":
    # Before torch, which imports torch_npu by itself.
    hold_back_torch_npu()
    take_broken_as_absent()

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_kernels.device_measurements import measurements

FORMAT = 2
"""Version of the file: 2 has measurements."""
NO_DEVICE = "there is no NPU here: torch.npu.is_available() is False; run this where npu-smi info lists one"


def empty_experts(device: str) -> str:
    """Return what the gradient of weights is where no expert has a token; it must be zero."""
    from mindspeed_kernels.ops.gmm import grouped_matmul

    spoil_memory(device)
    weight = torch.ones(4, 64, 32, dtype=torch.bfloat16, device=device, requires_grad=True)
    rows = torch.zeros(0, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    grouped_matmul(rows, weight, torch.zeros(4, dtype=torch.int64, device=device)).sum().backward()
    assert weight.grad is not None, "the weights got no gradient"
    assert not weight.grad.cpu().any(), (
        f"the gradient is not zero: {weight.grad.cpu().flatten()[:4].tolist()}"
    )
    return "zero"


def half_sink(device: str) -> str:
    """Return the largest error of attention with a learned offset of the softmax in bfloat16."""
    q, k, v = (_numbers(128, 1, 256, seed=seed) for seed in range(3))
    return _attention(device, (q, k, v, 4, "SBH"), {"scale": 0.125, "sink": _numbers(4, seed=3)})


def packed_statistics(device: str) -> str:
    """Return the largest error of contexts and softmax statistics of packed sequences."""
    q, k, v = (_numbers(192, 4, 64, seed=seed) for seed in range(3))
    ends = {"actual_seq_qlen": [70, 192], "actual_seq_kvlen": [70, 192]}
    return _attention(device, (q, k, v, 4, "TND"), {"scale": 0.125, **ends})


def masked_row(device: str) -> str:
    """Return the largest error where a mask leaves a query no key; its context must be zero."""
    q, k, v = (_numbers(128, 1, 256, seed=seed) for seed in range(3))
    mask = torch.ones(128, 128, dtype=torch.bool).triu(1)
    mask[5] = True
    options = {"scale": 0.125, "sparse_mode": 1, "atten_mask": mask}
    return _attention(device, (q, k, v, 4, "SBH"), options)


def group_names(device: str) -> str:
    """Return the name of a subgroup's communicator, by which the subgroup must be found again."""
    from mindspeed_kernels.ops.process_groups import hccl_name, process_group

    started = not dist.is_initialized()
    if started:
        dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([dist.get_rank()])
        dist.all_reduce(torch.ones(1, device=device), group=group)
        name = hccl_name(group)
        assert process_group(name, "group") is group, f"{name} leads to another group"
        return name
    finally:
        if started:
            dist.destroy_process_group()


RISKS: Mapping[str, Callable[[str], str]] = {
    "empty expert rank": empty_experts,
    "bf16 sink": half_sink,
    "TND statistics": packed_statistics,
    "fully masked row": masked_row,
    "group names on a subgroup": group_names,
}
"""Checks by name, the riskiest first."""


def risks(device: str = "npu") -> Iterator[dict[str, Any]]:
    """Run every check; yield its name, whether it passed, what it found and its seconds."""
    for name, check in RISKS.items():
        started = time.monotonic()
        try:
            found, passed = check(device), True
        except Exception as error:
            found, passed = f"{type(error).__name__}: {error}", False
        seconds = round(time.monotonic() - started, 3)
        yield {"check": name, "passed": passed, "found": found, "seconds": seconds}


def scenarios(features: Sequence[str] = (), platform: str = "npu") -> dict[str, Any]:
    """Run the proofs of features on a platform, by default of all; return the command's report."""
    command = [sys.executable, "-m", "mindspeed_core.cli.features", "verify", *(features or ["--all"])]
    done = subprocess.run(
        [*command, "--platform", platform, "--json"], capture_output=True, text=True, check=False
    )
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"ok": False, "error": done.stderr[-4000:] or done.stdout[-4000:]}
    return report


def machine() -> dict[str, str]:
    """Return the versions and the device that the results belong to."""
    import torch_npu

    npu = torch.npu  # type: ignore[attr-defined]
    return {
        "torch": torch.__version__,
        "torch_npu": torch_npu.__version__,
        "cann": str(getattr(torch_npu.version, "cann", "")),
        "device": npu.get_device_name(),
        "devices": str(npu.device_count()),
        "python": sys.version.split()[0],
    }


def spoil_memory(device: str) -> None:
    """Leave NaN in the memory that the next allocations get."""
    torch.full((1 << 20,), float("nan"), device=device)


def _numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def _attention(device: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    from mindspeed_kernels.ops.fusion_attention import (
        comparable,
        fusion_attention_reference,
        npu_fusion_attention,
    )

    spoil_memory(device)
    results = []
    for function, place in ((npu_fusion_attention, device), (fusion_attention_reference, "cpu")):
        given = [_placed(value, place) for value in args]
        named = {name: _placed(value, place) for name, value in options.items()}
        found = comparable(function(*given, **named))
        found[0].float().square().sum().backward()
        leaves = [value for value in (*given, *named.values()) if isinstance(value, Tensor)]
        gradients = [leaf.grad for leaf in leaves if leaf.requires_grad]
        reached = [gradient for gradient in gradients if gradient is not None]
        assert len(reached) == len(gradients), "an input got no gradient"
        results.append([tensor.detach().float().cpu() for tensor in (*found, *reached)])
    largest = 0.0
    for actual, other in zip(*results):
        torch.testing.assert_close(actual, other, rtol=3e-2, atol=3e-2)
        largest = max(largest, (actual - other).abs().max().item())
    return f"largest error {largest:.2g}"


def _placed(value: Any, place: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    moved = value.to(place)
    return moved.requires_grad_() if moved.is_floating_point() else moved


def main(arguments: Sequence[str]) -> int:
    """Run everything and write the report; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mindspeed_kernels.first_run", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="Where the JSON goes.")
    parser.add_argument(
        "--no-scenarios", action="store_true", help="Leave out the proofs of features, which take longest."
    )
    parser.add_argument(
        "--features", nargs="+", default=[], metavar="NAME", help="The features whose proofs run, not all."
    )
    parser.add_argument("--no-measurements", action="store_true", help="Leave out how fast the device is.")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="Only measure, on the CPU and in small sizes: shows the file where there is no NPU.",
    )
    options = parser.parse_args(arguments)
    if options.smoke:
        return _smoke(options.out)
    if not (hasattr(torch, "npu") and torch.npu.is_available()):
        print(libraries_missing() or NO_DEVICE, file=sys.stderr)
        return 2
    report: dict[str, Any] = {"format": FORMAT, "machine": machine(), "checks": []}

    def write() -> None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    write()
    for result in risks():
        report["checks"].append(result)
        print(
            f"{'passed' if result['passed'] else 'FAILED'}  {result['check']}: {result['found']}", flush=True
        )
        write()
    if not options.no_measurements:
        report["measurements"] = []
        for result in measurements("npu", options.out.resolve().parent):
            report["measurements"].append(result)
            print(_line(result), flush=True)
            write()
    if not options.no_scenarios:
        report["scenarios"] = scenarios(options.features)
        write()
    passed = all(check["passed"] for check in report["checks"]) and report.get("scenarios", {}).get(
        "ok", True
    )
    print(f"send {options.out} back, whole, with the output of npu-smi info")
    return 0 if passed else 1


def _smoke(out: Path) -> int:
    """Measure small sizes on the CPU, and write the file."""
    here = {"torch": torch.__version__, "device": "cpu", "python": sys.version.split()[0]}
    results = list(measurements("cpu", out.resolve().parent, small=True))
    report = {"format": FORMAT, "machine": here, "checks": [], "measurements": results}
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for result in results:
        print(_line(result))
    return 1 if any("error" in result for result in results) else 0


def _line(result: Mapping[str, Any]) -> str:
    told = result.get("error") or f"{result['value']:.4g} {result['unit']}"
    return f"{result['measure']}, {result['of']}: {told}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
