"""Stand-in libraries for the device runtime, made from the symbols that the installed torch_npu leaves open.

The libraries export every such symbol and refuse every call, so that nothing can be mistaken for a result of
a device. Only what is asked while a package is imported gets an honest answer: there is no device, or, on
request, one that has no memory. They are a test fixture, made anew for the installed version and never
shipped.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mindspeed_core.discovery.installed import package_places
from mindspeed_core.errors import UserError
from mindspeed_megatron.fake.npu import STAND_IN as DEVICES
from mindspeed_testing.npu.symbols import found_by_loader, needed, run_tool, symbols, without_own

MEMORY = "MINDSPEED_NPU_STUB_MEMORY"
"""Serves the device's memory from the host's while it is 1: the libraries ask at every call."""
SOC = "MINDSPEED_NPU_STUB_SOC"
SOURCE = Path(__file__).with_name("refusing_runtime.c")

_POINTERS = frozenset(
    """
    aclCreateDataBuffer aclCreateTensorDesc aclopCreateAttr acltdtCreateChannelWithCapacity
    acltdtCreateDataset acltdtGetDataAddrFromItem acltdtGetDataItem acltdtGetTensorInfo
    """.split()
)
"""Functions that return a pointer: they refuse with NULL, an error code would be taken for an address."""


@dataclass(frozen=True)
class Stubs:
    """Stand-in libraries in a folder.

    Attributes:
        directory: where they are.
        libraries: their sonames.
        symbols: the names they export for the sake of the package.
    """

    directory: Path
    libraries: tuple[str, ...]
    symbols: tuple[str, ...]

    def environment(self, *, device: bool = False, soc: str = "Ascend910B1") -> dict[str, str]:
        """Return the environment of a process that imports torch_npu with these libraries.

        Args:
            device: announce one device, for which shapes can be computed; memory is refused as ever, but
                inside of a `mindspeed_testing.npu.device.value_device`.
            soc: the product name of that device.
        """
        inherited = os.environ.get("LD_LIBRARY_PATH")
        path = os.pathsep.join(filter(None, (str(self.directory), inherited)))
        values = {**os.environ, "LD_LIBRARY_PATH": path, SOC: soc}
        for name in (DEVICES, MEMORY):
            values.pop(name, None)
        # What is queued would run on another thread, after the call that asked for it.
        return {**values, DEVICES: "1", "TASK_QUEUE_ENABLE": "0"} if device else values


def build_stubs(directory: Path, package: Path | None = None) -> Stubs:
    """Make the libraries that the installed torch_npu needs to be imported.

    Args:
        directory: an empty folder for them.
        package: folder of the package; by default that of the installed torch_npu, which is not imported.

    Raises:
        UserError: torch_npu, gcc or binutils is missing.
    """
    root = package if package is not None else _folder("torch_npu")
    libraries = sorted(path for path in root.rglob("*.so*") if path.is_file())
    if not libraries:
        raise UserError(f"no shared library below {root}; is this the folder of torch_npu?")
    providers = [*libraries, *_torch_libraries()]
    names, sonames = what_is_missing(libraries, providers)
    return compile_stubs(directory, sonames, names)


def what_is_missing(
    libraries: Sequence[Path], providers: Sequence[Path]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the symbols and sonames that nobody offers.

    Args:
        libraries: the libraries that are to be loaded.
        providers: libraries that will be in the process, ``libraries`` included.
    """
    found = found_by_loader(libraries)
    here = {path.name for path in providers}
    sonames = sorted(
        {n for path in libraries for n in needed(path) if n not in here and found.get(n) is None}
    )
    wanted: set[str] = set()
    offered: set[str] = set()
    for path in {path.resolve() for path in (*providers, *filter(None, found.values()))}:
        asks, gives = symbols(path)
        offered |= gives
        if path in {library.resolve() for library in libraries}:
            wanted |= asks
    return tuple(without_own(wanted - offered)), tuple(sonames)


def compile_stubs(directory: Path, sonames: Iterable[str], names: Iterable[str]) -> Stubs:
    """Compile one object that exports ``names`` and refuses, and link it under every soname.

    Every library has everything, because some functions are looked up by name in one certain library.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = written_functions(SOURCE.read_text(encoding="utf-8"))
    names = tuple(names)
    lines = [f"{_kind(name)}({name})\n" for name in names if name not in written]
    (directory / "other_symbols.h").write_text("".join(lines), encoding="utf-8")
    built = directory / "runtime.o"
    run_tool("gcc", "-c", "-fPIC", "-O1", "-w", f"-I{directory}", "-o", str(built), str(SOURCE))
    sonames = tuple(sonames)
    for soname in sonames:
        run_tool("gcc", "-shared", f"-Wl,-soname,{soname}", "-o", str(directory / soname), str(built))
    return Stubs(directory, sonames, names)


def written_functions(source: str) -> frozenset[str]:
    """Return the functions that the C source writes out itself."""
    defined = re.findall(r"^[a-z][\w \*]*?\b(\w+)\([^;{]*\)\s*\{", source, re.MULTILINE)
    return frozenset(defined) | frozenset(
        re.findall(r"^WITH_(?:DEVICE|MEMORY)\((\w+)\)", source, re.MULTILINE)
    )


def installed_version() -> str:
    """Return the version of the installed torch_npu.

    Raises:
        UserError: it is not installed.
    """
    try:
        return version("torch_npu")
    except PackageNotFoundError as error:
        raise UserError(
            "torch_npu is not installed here; install the one whose version equals torch's, in an "
            "environment of its own (beside it, torch can only be imported with the stand-in libraries)"
        ) from error


def check_stubbed(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to go on in a process that was not started with the stand-in libraries and their device.

    Raises:
        UserError: says how to start it.
    """
    if environment.get(DEVICES) != "1":
        raise UserError(
            "this process has no stand-in NPU; start the tests with python -m mindspeed_testing.npu "
            f"PATHS, which sets LD_LIBRARY_PATH and {DEVICES}=1 before Python starts"
        )


def _kind(name: str) -> str:
    return "POINTER" if name in _POINTERS else "STATUS"


def _folder(package: str) -> Path:
    installed_version()
    for place in package_places(package):
        return place
    raise UserError(f"{package} cannot be found in {sys.prefix}")


def _torch_libraries() -> list[Path]:
    for place in package_places("torch"):
        return sorted(path for path in (place / "lib").glob("*.so*") if path.is_file())
    raise UserError(f"torch is not installed in {sys.prefix}")
