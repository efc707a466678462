"""Symbols and sources of the stand-in libraries, on a small library instead of torch_npu."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_core.errors import UserError
from mindspeed_testing.npu import stubs
from mindspeed_testing.npu.__main__ import main
from mindspeed_testing.npu.symbols import parse_loader, parse_symbols, without_own

LISTING = """\
aclrtMalloc U
memcpy@GLIBC_2.14 U
__gmon_start__ w
defined_weakly W 1139 b
_ZN2at5emptyEv T 1139 b
a line that is none
"""


def test_wanted_and_offered_symbols_are_told_apart():
    wanted, offered = parse_symbols(LISTING)
    assert wanted == {"aclrtMalloc", "memcpy"}
    assert offered == {"defined_weakly", "_ZN2at5emptyEv"}


def test_the_loader_s_answer_is_read_with_its_own_path():
    found = parse_loader(
        "\tlinux-vdso.so.1 (0x1)\n\tlibhccl.so => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x2)\n"
        "\t/lib64/ld-linux-x86-64.so.2 (0x3)\n"
    )
    assert found == {
        "libhccl.so": None,
        "libc.so.6": Path("/lib/libc.so.6"),
        "ld-linux-x86-64.so.2": Path("/lib64/ld-linux-x86-64.so.2"),
    }


def test_what_the_interpreter_offers_needs_no_stand_in():
    assert without_own(["PyLong_FromLong", "strlen", "aclrtMalloc"]) == ["aclrtMalloc"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Stand-ins for what one small library wants, and that library."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "hccl.c").write_text("int HcclCommInitAll(void) { return 0; }\n")
    (folder / "wants.c").write_text(
        "int HcclCommInitAll(void); int aclInit(char *);\n"
        "void *aclCreateTensorDesc(void); int aclrtMalloc(void);\n"
        "int start(void) { return aclInit(0); }\n"
        "int talk(void) { return HcclCommInitAll() + aclrtMalloc(); }\n"
        "int describe(void) { return aclCreateTensorDesc() != 0; }\n"
    )
    compiled = ["gcc", "-shared", "-fPIC", "-o"]
    link = [str(folder / "libhccl.so"), str(folder / "hccl.c"), "-Wl,-soname,libhccl.so"]
    subprocess.run([*compiled, *link], check=True)
    wants = folder / "wants" / "libwants.so"
    wants.parent.mkdir()
    linked = [str(wants), str(folder / "wants.c"), f"-L{folder}", "-lhccl"]
    subprocess.run([*compiled, *linked], check=True)
    return stubs.build_stubs(tmp_path_factory.mktemp("stubs"), wants.parent), wants


def test_stand_ins_have_the_missing_libraries_and_symbols(made):
    built, _ = made
    assert built.libraries == ("libhccl.so",)
    assert set(built.symbols) == {"HcclCommInitAll", "aclInit", "aclrtMalloc", "aclCreateTensorDesc"}
    assert (built.directory / "libhccl.so").is_file()


def call(made, function, **options):
    """The status of a function of the small library, in a process with the stand-ins."""
    built, wants = made
    script = "import ctypes, sys; print(getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])())"
    done = subprocess.run(
        [sys.executable, "-c", script, str(wants), function],
        env=built.environment(**options),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(done.stdout)


def test_a_library_with_stand_ins_is_loaded_starts_and_is_refused_what_it_asks(made):
    assert call(made, "start") == 0
    assert call(made, "talk") == 2 * 507899
    assert call(made, "talk", device=True) == 2 * 507899


def test_a_pointer_is_refused_with_null(made):
    assert call(made, "describe") == 0


def devices(built, monkeypatch):
    library = ctypes.CDLL(str(built.directory / "libhccl.so"))
    count = ctypes.c_uint32(7)
    assert library.aclrtGetDeviceCount(ctypes.byref(count)) == 0
    return count.value, library.aclrtSetDevice(0)


def test_a_device_is_there_only_where_it_was_announced(made, monkeypatch):
    built, _ = made
    # ctypes reads the environment of the C library, which os.environ changes with it.
    monkeypatch.delenv(stubs.DEVICES, raising=False)
    assert devices(built, monkeypatch) == (0, 507899)
    monkeypatch.setenv(stubs.DEVICES, "1")
    assert devices(built, monkeypatch) == (1, 0)


def test_the_environment_announces_a_device_only_on_request(made, monkeypatch):
    built, _ = made
    monkeypatch.setenv(stubs.DEVICES, "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "elsewhere")
    assert stubs.DEVICES not in built.environment()
    assert built.environment(device=True)[stubs.DEVICES] == "1"
    assert built.environment()["LD_LIBRARY_PATH"].split(":") == [str(built.directory), "elsewhere"]


def test_functions_with_an_answer_are_not_generated_again():
    written = stubs.written_functions(stubs.SOURCE.read_text())
    assert {"aclInit", "aclrtGetDeviceCount", "aclrtDestroyStream"} <= written
    assert "aclrtLaunchKernel" not in written


def test_a_folder_without_libraries_is_not_torch_npu(tmp_path):
    with pytest.raises(UserError, match="no shared library below"):
        stubs.build_stubs(tmp_path / "stubs", tmp_path)


def test_a_process_without_stand_ins_is_told_how_to_start():
    with pytest.raises(UserError, match=r"python -m mindspeed_testing\.npu PATHS"):
        stubs.check_stubbed({})


def test_the_command_says_what_is_not_installed(monkeypatch, capsys):
    def absent(name):
        raise stubs.PackageNotFoundError(name)

    monkeypatch.setattr(stubs, "version", absent)
    assert main(["."]) == 1
    assert "torch_npu is not installed here" in capsys.readouterr().err
