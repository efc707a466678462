"""Checks of a machine before a training fails on it: versions, devices, limits, common mistakes.

Every finding carries its remedy. The checks are functions from facts to findings, so that each mistake can be
tested without making it; `collect` gathers the facts, torch's in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from mindspeed_core.discovery.host import ERROR, NOTE, OK, WARNING, Finding
from mindspeed_megatron.doctor import ascend
from mindspeed_megatron.doctor.facts import Facts
from mindspeed_megatron.doctor.supported_versions import (
    MEGATRON_CORE,
    NPU_CANN,
    NPU_WITHOUT_CANN,
    PYTHON,
    TABLE,
    Supported,
    is_proven,
    matches,
    proven_pairs,
    same_release,
)
from mindspeed_megatron.touch_points.changes import listed

MINIMUM_OPEN_FILES = 4096
MINIMUM_SHARED_MEMORY = 1 << 30


def examine(facts: Facts) -> list[Finding]:
    """Return every finding, in the order of the checks; a pure function of the facts."""
    return [*(finding for check in CHECKS for finding in check(facts)), *facts.of_host]


def check_python(facts: Facts) -> Iterator[Finding]:
    """Check the interpreter."""
    if matches(facts.python, PYTHON):
        yield Finding(OK, "python", facts.python)
    else:
        yield Finding(ERROR, "python", f"{facts.python} is not {PYTHON}", f"use a Python {PYTHON}")


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Check installed distributions against the compatibility table."""
    for row in TABLE:
        found = facts.versions.get(row.distribution, "")
        if not found:
            if row.required:
                yield Finding(ERROR, row.distribution, "is not installed", row.remedy)
        elif not matches(found, row.versions):
            yield Finding(ERROR, row.distribution, f"{found} is outside {row.versions}", row.remedy)
        else:
            yield Finding(OK, row.distribution, found + _untested(row, found, facts.python))


def _untested(row: Supported, found: str, python: str) -> str:
    """Say in brackets that a version, or megatron-core's with this Python, is only expected to work."""
    if row.distribution == "megatron-core":
        if is_proven(python, found):
            return ""
        proven = ", ".join(f"{core} on Python {minor}" for minor, core in proven_pairs())
        return f" (expected to work on Python {python}; the test suite was run with {proven})"
    if not row.tested or any(matches(found, f"=={release}") for release in row.tested):
        return ""
    return f" (supported; tested with {', '.join(row.tested)})"


def check_torch(facts: Facts) -> Iterator[Finding]:
    """Check that torch imports and has a collective backend."""
    if facts.probe_error:
        remedy = "reinstall torch and megatron-core in a fresh environment, then run this again"
        yield Finding(ERROR, "torch import", facts.probe_error, remedy)
        return
    loaded = str(facts.torch.get("torch", ""))
    if loaded.startswith("error"):
        remedy = "reinstall torch: pip install --force-reinstall torch"
        if "backend extension" in loaded:
            extension = "torch_npu" if "torch_npu" in loaded else "the extension"
            remedy = (
                f"mend {extension}, which torch imports by itself, or uninstall it; "
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0 trains without it"
            )
        yield Finding(ERROR, "torch import", loaded, remedy)
        return
    backends: Mapping[str, bool] = facts.torch.get("backends", {})
    usable = [name for name in ("gloo", "nccl", "hccl") if backends.get(name)]
    if not usable:
        remedy = "install a torch built with distributed support"
        yield Finding(ERROR, "collective backends", "torch has neither gloo nor NCCL nor HCCL", remedy)
        return
    yield Finding(OK, "collective backends", ", ".join(usable))
    for device, backend in (("cuda", "nccl"), ("npu", "hccl")):
        names = list(facts.torch.get(device, []))
        if not names:
            continue
        yield Finding(OK, f"{device} devices", f"{len(names)} x {names[0]}")
        if not backends.get(backend):
            remedy = f"install a torch whose {backend.upper()} works; on one process training works without"
            yield Finding(WARNING, backend.upper(), f"{device} devices without {backend.upper()}", remedy)
    if not facts.torch.get("cuda") and not facts.torch.get("npu"):
        yield Finding(NOTE, "devices", "no GPU or NPU: training runs on the cpu platform (gloo)")


def check_touch_points(facts: Facts) -> Iterator[Finding]:
    """Name what an unknown megatron-core has otherwise than the known one it is compared with."""
    found = facts.survey
    if found is None:
        return
    subject = "megatron-core"
    remedy = f"pip install megatron-core=={found.compared}"
    if not found.changes:
        yield Finding(NOTE, subject, str(found), remedy)
        return
    # What breaks comes first.
    told = sorted(found.changes, key=lambda change: not change.breaks)
    yield Finding(WARNING, subject, f"{found}{listed(told, everything=True)}", remedy)


def check_megatron(facts: Facts) -> Iterator[Finding]:
    """Check that megatron-core and its compiled index builder import."""
    if facts.probe_error or "megatron" not in facts.torch:
        return
    outcome = facts.torch["megatron"]
    if outcome != "ok":
        remedy = f"pip install --force-reinstall 'megatron-core{MEGATRON_CORE}'"
        yield Finding(ERROR, "megatron-core import", outcome, remedy)
        return
    helpers = facts.torch.get("helpers_cpp", "")
    if helpers != "ok":
        remedy = "install a megatron-core wheel for this Python and system"
        remedy += f", or build it: {facts.helpers_build}" if facts.helpers_build else ""
        found = f"megatron-core's compiled index builder does not load ({helpers}); datasets need it"
        yield Finding(ERROR, "helpers_cpp", found, remedy)
    else:
        yield Finding(OK, "helpers_cpp", "megatron-core's compiled index builder loads")


def check_npu(facts: Facts) -> Iterator[Finding]:
    """Check that torch_npu fits torch, works, and is the only device extension."""
    npu = facts.versions.get("torch_npu", "")
    if not npu:
        return
    torch_version = facts.versions.get("torch", "")
    if torch_version and not same_release(npu, torch_version):
        found = f"torch_npu {npu} was built for another torch than {torch_version}"
        remedy = f"pip install torch_npu=={torch_version.split('+')[0]}, or the torch that it was built for"
        yield Finding(ERROR, "torch_npu", found, remedy)
    yield from ascend.check_versions(facts.ascend, npu, NPU_CANN)
    yield from ascend.check_variables(facts.environment)
    if "unserved" in facts.torch:
        compared = {**NPU_CANN, "": NPU_WITHOUT_CANN}
        yield from ascend.check_calls(npu, facts.torch["unserved"], compared)
    yield from ascend.check_generations(facts.torch.get("npu", ()))
    outcome = facts.torch.get("torch_npu", "ok")
    if facts.cann_missing:
        missing, _, remedy = facts.cann_missing.partition("; ")
        # Without devices everything else goes on, since torch is imported without it.
        severity = ERROR if facts.ascend_devices else WARNING
        yield Finding(severity, "torch_npu", f"does not import: {missing}", remedy)
    elif outcome != "ok":
        remedy = "source the CANN toolkit's set_env.sh in this shell, and check the driver with npu-smi info"
        yield Finding(ERROR, "torch_npu", f"does not import: {outcome}", remedy)
    if facts.torch.get("cuda"):
        remedy = "choose with --platform npu or --platform cuda, or uninstall torch_npu on this machine"
        yield Finding(WARNING, "torch_npu", "is installed on a machine with CUDA devices", remedy)


def check_environment(facts: Facts) -> Iterator[Finding]:
    """Check environment variables that cost speed or correctness."""
    threads = facts.environment.get("OMP_NUM_THREADS", "")
    if not threads:
        remedy = "export OMP_NUM_THREADS=1 (or CPU cores divided by processes per node)"
        found = f"is not set: each process starts up to {facts.cpus} threads"
        yield Finding(NOTE, "OMP_NUM_THREADS", found, remedy)
    elif not threads.split(",")[0].isdigit() or int(threads.split(",")[0]) < 1:
        yield Finding(WARNING, "OMP_NUM_THREADS", f"{threads!r} is no number", "export OMP_NUM_THREADS=1")
    connections = facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if facts.torch.get("cuda") and connections != "1":
        found = f"is {connections or 'not set'}: tensor or context parallelism may not overlap as planned"
        remedy = "export CUDA_DEVICE_MAX_CONNECTIONS=1 (not needed on Blackwell, nor with FSDP)"
        yield Finding(NOTE, "CUDA_DEVICE_MAX_CONNECTIONS", found, remedy)


def check_limits(facts: Facts) -> Iterator[Finding]:
    """Check limits of the system that end trainings hours later."""
    if facts.open_files is not None and 0 <= facts.open_files < MINIMUM_OPEN_FILES:
        found = f"ulimit -n is {facts.open_files}; data loaders and checkpoints open more"
        yield Finding(WARNING, "open files", found, "ulimit -n 65536 (in the shell that starts the training)")
    if facts.shared_memory is not None and facts.shared_memory < MINIMUM_SHARED_MEMORY:
        found = f"/dev/shm has {facts.shared_memory / 2**20:.0f} MiB; data-loader workers and gloo use it"
        yield Finding(WARNING, "shared memory", found, "in a container: --shm-size=8g, or --ipc=host")


def check_transformer_engine(facts: Facts) -> Iterator[Finding]:
    """Report the layer implementation that models are built from."""
    installed = facts.versions.get("transformer-engine", "")
    outcome = facts.torch.get("optional", {}).get("transformer_engine", "ok")
    if installed and outcome != "ok":
        found = f"{installed} does not import, so its layers are refused: {outcome}"
        remedy = "mend or uninstall it (without CUDA it has no use), or train with --transformer-impl local"
        yield Finding(NOTE, "transformer-engine", found, remedy)
        return
    found = (
        f"{installed}: --transformer-impl transformer_engine works"
        if installed
        else "is not installed: models are built from megatron-core's local layers; FP8 and TE's fused "
        "layers are not there, features that need them say so in the plan"
    )
    yield Finding(NOTE, "transformer-engine", found)


def check_optional_packages(facts: Facts) -> Iterator[Finding]:
    """Name optional packages that are installed and cannot be imported."""
    for name, outcome in facts.torch.get("optional", {}).items():
        if outcome != "ok" and name != "transformer_engine":
            found = f"is installed and does not import, so nothing here uses it: {outcome}"
            yield Finding(WARNING, name, found, "mend or uninstall it")


def check_older_package(facts: Facts) -> Iterator[Finding]:
    """Warn of another package that patches megatron-core."""
    if "mindspeed" in facts.versions:
        found = (
            f"the package mindspeed {facts.versions['mindspeed']} is installed beside this one; both change "
            "megatron-core when both are imported"
        )
        remedy = "import only one of mindspeed.megatron_adaptor and mindspeed_core.megatron_adaptor"
        yield Finding(WARNING, "mindspeed", found, remedy)


def check_platforms(facts: Facts) -> Iterator[Finding]:
    """Report what each installed platform says about this machine."""
    for name, (available, reason) in sorted(facts.platforms.items()):
        yield Finding(OK if available else NOTE, f"platform {name}", reason)


def check_plugins(facts: Facts) -> Iterator[Finding]:
    """Check for broken plugins, and that the host is installed."""
    for who, error, remedy in facts.broken:
        yield Finding(WARNING, f"plugin {who}", error, remedy)
    if facts.host not in facts.hosts:
        found = f"{facts.host!r} is not installed; there are: {', '.join(facts.hosts) or 'none'}"
        yield Finding(ERROR, "host", found, "choose one of them")


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    check_python,
    check_versions,
    check_touch_points,
    check_torch,
    check_megatron,
    check_npu,
    check_environment,
    check_limits,
    check_transformer_engine,
    check_optional_packages,
    check_older_package,
    check_platforms,
    check_plugins,
)
