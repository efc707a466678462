"""Facts about a machine that the checks of doctor examine."""

from __future__ import annotations

import json
import os
import platform as machine
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_core.discovery.entry_points import load_object
from mindspeed_core.discovery.host import DEFAULT_HOST, Finding
from mindspeed_core.errors import UserError
from mindspeed_megatron.dataset_helpers import build_command, installed_folder
from mindspeed_megatron.devices.cann import libraries_missing
from mindspeed_megatron.devices.npu import device_files
from mindspeed_megatron.doctor import ascend
from mindspeed_megatron.doctor.probe import MARK
from mindspeed_megatron.doctor.supported_versions import TABLE

if TYPE_CHECKING:
    from mindspeed_core.registry import Registry
    from mindspeed_megatron.touch_points.survey import Survey


PROBE_SECONDS = 180
FURTHER_DISTRIBUTIONS = ("torch_npu", "transformer-engine", "apex", "flash-attn", "mindspeed")


@dataclass(frozen=True)
class Facts:
    """The input of the checks.

    Attributes:
        python: version of the interpreter.
        versions: installed distributions of interest, by name; absent ones are missing.
        torch: the answer of `mindspeed_megatron.doctor.probe`; empty with ``probe_error`` set when it died.
        probe_error: why the probe gave no answer.
        environment: the process's environment.
        open_files: soft limit of open files, None where the system has none.
        shared_memory: bytes of ``/dev/shm``, None where there is none.
        cpus: CPU cores this process may use.
        host: the host whose training is meant.
        hosts: hosts that are installed.
        platforms: installed platforms that load: whether each can be used here, and why (not).
        broken: broken plugins: (distribution and version, error, remedy).
        of_host: what the host itself looked at.
        helpers_build: command that compiles megatron-core's index builder; empty where its source is not.
        ascend: versions of driver, firmware and CANN, where their files tell them.
        cann_missing: why torch_npu does not find CANN; empty where it does, and without torch_npu.
        ascend_devices: NPUs that the driver shows.
        survey: the touch points of a megatron-core of an unknown version; None for a known one.
    """

    python: str = machine.python_version()
    versions: Mapping[str, str] = field(default_factory=dict)
    torch: Mapping[str, Any] = field(default_factory=dict)
    probe_error: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    open_files: int | None = None
    shared_memory: int | None = None
    cpus: int = 1
    host: str = DEFAULT_HOST
    hosts: tuple[str, ...] = (DEFAULT_HOST,)
    platforms: Mapping[str, tuple[bool, str]] = field(default_factory=dict)
    broken: tuple[tuple[str, str, str], ...] = ()
    of_host: tuple[Finding, ...] = ()
    helpers_build: str = ""
    ascend: Mapping[str, str] = field(default_factory=dict)
    cann_missing: str = ""
    ascend_devices: int = 0
    survey: Survey | None = None


def collect(
    registry: Registry, host: str = DEFAULT_HOST, begin: Callable[[str], object] = lambda _: None
) -> Facts:
    """Gather the facts about this machine, for a training with ``host``.

    Args:
        registry: what is installed.
        host: its name.
        begin: called with a few words before each part that takes its time.
    """
    names = {row.distribution for row in TABLE} | set(FURTHER_DISTRIBUTIONS)
    versions = {name: found for name in sorted(names) if (found := _version(name))}
    begin("importing torch and megatron-core in another process")
    answer, problem = _probe_torch()
    begin("asking platforms and the host")
    return Facts(
        versions=versions,
        torch=answer,
        probe_error=problem,
        environment=dict(os.environ),
        open_files=_open_files(),
        shared_memory=_shared_memory(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        host=host,
        hosts=tuple(registry.host_names()),
        platforms=_platforms(registry),
        broken=tuple((f"{b.dist} {b.version}".strip(), b.error, b.remedy) for b in registry.broken),
        of_host=_of_host(registry, host),
        helpers_build=build_command(folder) if (folder := installed_folder()) else "",
        ascend=ascend.ascend_versions(os.environ),
        cann_missing=libraries_missing(),
        ascend_devices=device_files(Path("/dev")),
        survey=_survey(registry, versions.get("megatron-core", "")),
    )


def _survey(registry: Registry, installed: str) -> Survey | None:
    """Compare the touch points of a megatron-core whose version is unknown."""
    from mindspeed_megatron.touch_points.survey import is_recorded, survey

    if not installed or is_recorded(installed):
        return None
    return survey(installed, (name for names in registry.packages().values() for name in names))


def _of_host(registry: Registry, host: str) -> tuple[Finding, ...]:
    """Return the findings of the host's own checks; one that is not installed is reported elsewhere."""
    with suppress(UserError):
        declared = registry.host(host).doctor
        return tuple(load_object(declared)()) if declared else ()
    return ()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _platforms(registry: Registry) -> dict[str, tuple[bool, str]]:
    """Ask each platform; one that cannot be loaded is among the registry's broken plugins afterwards."""
    answers = {}
    for name in registry.platform_names():
        with suppress(UserError):
            verdict = registry.platform(name).probe()
            answers[name] = (verdict.available, verdict.reason)
    return answers


def _probe_torch() -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "mindspeed_megatron.doctor.probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {}, f"importing torch did not finish within {PROBE_SECONDS} seconds"
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            answer: dict[str, Any] = json.loads(line[len(MARK) :])
            return answer, ""
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {}, f"the process that imports torch and megatron-core ended with status {done.returncode}: {last}"


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _shared_memory() -> int | None:
    path = Path("/dev/shm")
    if not path.is_dir():
        return None
    figures = os.statvfs(path)
    return figures.f_frsize * figures.f_blocks
