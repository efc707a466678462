"""Checks of Ascend machines: versions in CANN's files, variables of HCCL and torch_npu."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.version import Version

from mindspeed_core.discovery.host import NOTE, OK, WARNING, Finding
from mindspeed_core.platforms.machine import first_match
from mindspeed_megatron.backend_contracts.hccl import contract_for
from mindspeed_megatron.devices.ascend_generations import generation_of

_VERSION_FILES = {
    "driver": ("/usr/local/Ascend/driver/version.info", r"^Version=(.+)$"),
    "firmware": ("/usr/local/Ascend/firmware/version.info", r"^Version=(.+)$"),
}
_TOOLKIT = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_SECONDS = re.compile(r"\d+")


def ascend_versions(environment: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Read driver, firmware and CANN versions from their files, where they are installed.

    Args:
        environment: names CANN's folder, once its set_env.sh was sourced.
        root: of the file system.
    """
    found = {}
    for name, (path, pattern) in _VERSION_FILES.items():
        version = first_match(root / path.lstrip("/"), pattern)
        if version:
            found[name] = version
    for variable in _TOOLKIT:
        folder = environment.get(variable, "")
        version = first_match(Path(folder) / "version.cfg", r"\[([^\]]+)\]") if folder else ""
        if version:
            found["CANN"] = version.partition(":")[2] or version
            break
    return found


def check_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Name values of HCCL's and torch_npu's variables that contradict each other or slow a training down.

    Args:
        environment: of the process.
    """
    connect = _seconds(environment, "HCCL_CONNECT_TIMEOUT")
    execute = _seconds(environment, "HCCL_EXEC_TIMEOUT")
    given = environment.get("HCCL_CONNECT_TIMEOUT", "")
    if given and (connect is None or not 120 <= connect <= 7200):
        found = f"{given!r} is no number of seconds from 120 to 7200"
        yield Finding(WARNING, "HCCL_CONNECT_TIMEOUT", found, "export HCCL_CONNECT_TIMEOUT=600")
    if connect is not None and execute is not None and execute < connect:
        found = f"is {execute} s, below HCCL_CONNECT_TIMEOUT of {connect} s"
        yield Finding(
            WARNING, "HCCL_EXEC_TIMEOUT", found, "make it the longer one: first steps wait for both"
        )
    if execute == 0:
        found = "is 0: a rank that waits for a lost one waits for ever"
        yield Finding(WARNING, "HCCL_EXEC_TIMEOUT", found, "export HCCL_EXEC_TIMEOUT=1800")
    sync = _seconds(environment, "ACL_DEVICE_SYNC_TIMEOUT")
    if sync is not None and execute is not None and 0 < sync < execute:
        found = f"is {sync} s: the device gives up before HCCL does after {execute} s"
        yield Finding(WARNING, "ACL_DEVICE_SYNC_TIMEOUT", found, "make it longer than HCCL_EXEC_TIMEOUT")
    if environment.get("ASCEND_LAUNCH_BLOCKING") == "1":
        found = "is 1: every kernel is waited for"
        yield Finding(WARNING, "ASCEND_LAUNCH_BLOCKING", found, "unset it outside of debugging")
    queue = environment.get("TASK_QUEUE_ENABLE", "")
    if queue == "0":
        found = "is 0: kernels are launched one by one from Python"
        yield Finding(NOTE, "TASK_QUEUE_ENABLE", found, "export TASK_QUEUE_ENABLE=2, or unset it")
    if queue not in ("", "0") and environment.get("ASCEND_LAUNCH_BLOCKING") == "1":
        found = f"is {queue}, which ASCEND_LAUNCH_BLOCKING=1 contradicts"
        yield Finding(WARNING, "TASK_QUEUE_ENABLE", found, "unset one of them")
    buffer = environment.get("HCCL_BUFFSIZE", "")
    if buffer and (not buffer.isdigit() or int(buffer) < 1):
        found = f"{buffer!r} is no number of MiB"
        yield Finding(WARNING, "HCCL_BUFFSIZE", found, "export HCCL_BUFFSIZE=200, its default")
    yield from _allocator(environment)
    yield from _ports(environment)


def _allocator(environment: Mapping[str, str]) -> Iterator[Finding]:
    given = environment.get("PYTORCH_NPU_ALLOC_CONF", "").split(",")
    options = {name: value for name, _, value in (option.strip().partition(":") for option in given)}
    others = [name for name in ("max_split_size_mb", "garbage_collection_threshold") if name in options]
    if options.get("expandable_segments", "").lower() == "true" and others:
        # torch_npu, NPUAllocatorConfig.cpp
        found = f"has expandable_segments and {others[0]}, which torch_npu refuses together at its start"
        yield Finding(WARNING, "PYTORCH_NPU_ALLOC_CONF", found, f"leave {others[0]} out")
    mode = environment.get("CPU_AFFINITY_CONF", "").partition(",")[0].removeprefix("mode:")
    if mode not in ("", "0", "1", "2"):
        found = f"begins with {mode!r}, which is no mode: processes are not bound"
        yield Finding(WARNING, "CPU_AFFINITY_CONF", found, "export CPU_AFFINITY_CONF=1")


def _ports(environment: Mapping[str, str]) -> Iterator[Finding]:
    base = environment.get("HCCL_IF_BASE_PORT", "")
    if base and not (base.isdigit() and 1024 <= int(base) <= 65520):
        found = f"{base!r} is no port from 1024 to 65520"
        yield Finding(WARNING, "HCCL_IF_BASE_PORT", found, "export HCCL_IF_BASE_PORT=60000, its default")
    ranges = [
        name
        for name in ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE")
        if environment.get(name)
    ]
    host = environment.get("HCCL_HOST_SOCKET_PORT_RANGE", "")
    if base and host:
        # Ports of devices are others.
        found = f"is {base}, and HCCL_HOST_SOCKET_PORT_RANGE is {host}: HCCL takes the range"
        yield Finding(NOTE, "HCCL_IF_BASE_PORT", found, "unset one of them")
    for name in ranges:
        problem = _problem_of_ports(environment[name])
        if problem:
            found = f"{environment[name]!r} {problem}"
            yield Finding(WARNING, name, found, f"export {name}=60000-60050, or auto")
    if environment.get("HCCL_WHITELIST_DISABLE") == "0" and not environment.get("HCCL_WHITELIST_FILE"):
        found = "is 0 without HCCL_WHITELIST_FILE: no rank may connect"
        yield Finding(
            WARNING, "HCCL_WHITELIST_DISABLE", found, "export HCCL_WHITELIST_DISABLE=1, or name the file"
        )


def _problem_of_ports(given: str) -> str:
    """Return what is wrong with the ports that a variable names, empty where nothing is."""
    if given == "auto":
        return ""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", given):
        return "is no range of ports"
    ends = [tuple(map(int, (part.partition("-")[0], part.rpartition("-")[2]))) for part in given.split(",")]
    if any(low > high or low < 1024 or high > 65535 for low, high in ends):
        return "has a part that is no range of ports from 1024 to 65535"
    ordered = sorted(ends)
    if any(later[0] <= earlier[1] for earlier, later in itertools.pairwise(ordered)):
        return "has parts that overlap"
    return ""


def check_versions(
    versions: Mapping[str, str], torch_npu: str, builds: Mapping[str, tuple[str, ...]]
) -> Iterator[Finding]:
    """Report driver, firmware and CANN, and a CANN that is older than the build of torch_npu was made for.

    Args:
        versions: from `ascend_versions`.
        torch_npu: installed build.
        builds: builds by CANN release, newest release first.
    """
    for name, version in versions.items():
        yield Finding(OK, name, version)
    cann = versions.get("CANN", "")
    if not cann or not torch_npu:
        return
    made_for = next((release for release, made in builds.items() if torch_npu in made), "")
    if made_for and _order(cann) < _order(made_for):
        found = f"{torch_npu} was made for CANN {made_for}, and {cann} is installed"
        remedy = f"install CANN {made_for} or later, or a torch_npu that was made for {cann}"
        yield Finding(WARNING, "torch_npu", found, remedy)


def check_calls(
    torch_npu: str, unserved: Sequence[tuple[str, bool]], builds: Mapping[str, tuple[str, ...]]
) -> Iterator[Finding]:
    """Name the calls that the installed build does not take, and a build that is newer than the table.

    Args:
        torch_npu: installed build.
        unserved: calls that it does not take, each with whether sources ask before they call.
        builds: builds by CANN release.
    """
    newest = max((build for made in builds.values() for build in made), key=Version)
    newer = Version(torch_npu) > Version(newest)
    told = f"{torch_npu} is newer than every build that was checked (up to {newest})" if newer else torch_npu
    failing = [call for call, asked_first in unserved if not asked_first]
    if failing:
        remedy = f"install torch_npu {newest}, or do without the features of these files"
        yield Finding(WARNING, "torch_npu", f"{told} and does not take: {'; '.join(failing)}", remedy)
    elif newer:
        found = f"{told}; it takes every call of the installed packages, by its schemas"
        yield Finding(NOTE, "torch_npu", found)
    standing_down = [call for call, asked_first in unserved if asked_first]
    if standing_down:
        found = f"{torch_npu} lacks what these kernels need, and others take over: {'; '.join(standing_down)}"
        yield Finding(NOTE, "torch_npu", found, "mindspeed-features plan shows which; later builds have them")


def check_generations(devices: Sequence[str]) -> Iterator[Finding]:
    """Name devices of a generation that nobody knows, and the rules that are assumed for them.

    Args:
        devices: names that the runtime gives the NPUs.
    """
    for name in dict.fromkeys(devices):
        if not generation_of(name):
            rules = contract_for(name).generation
            found = (
                f"{name} is of a generation that is not known: communication is held to the rules of {rules} "
                "in plans, and every kernel is taken to be there"
            )
            remedy = "run python -m mindspeed_kernels.first_run, and report its file"
            yield Finding(WARNING, "npu", found, remedy)


def _order(release: str) -> tuple[int, ...]:
    """Return the numbers of a release of CANN, ``8.3.RC1`` before ``8.3.0``."""
    parts = [part for part in re.split(r"[.]", release) if part]
    return tuple(
        int(part) * 100 if part.isdigit() else int(re.sub(r"\D", "", part) or 0) - 100 for part in parts
    )


def _seconds(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "")
    return int(value) if _SECONDS.fullmatch(value) else None
