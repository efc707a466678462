"""The program that locks itself in and then becomes a fresh interpreter; run with ``python -I -S``.

Its arguments are an empty folder, limits, ``namespaces`` or ``plain``, and a pipe; standard input is the
program to run. With namespaces it sees a file system of its own: a small one in memory with the interpreter,
read only. In both forms a filter of system calls forbids processes, sockets, signals and tracing.

A byte goes into the pipe right before the interpreter starts. Without it nothing ran, and standard error says
why.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

_LOCKED_OUT = 125
_USER, _PID, _NET, _FILES, _IPC, _HOST = 0x10000000, 0x20000000, 0x40000000, 0x20000, 0x08000000, 0x04000000
_RDONLY, _NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_NO_NEW_PRIVILEGES, _SECCOMP, _SECCOMP_FILTER, _PARENT_DEATH = 38, 22, 2, 1
_MOUNT_SETATTR = 442
_INSIDE = 65534
"""The id inside: not 0, so that the interpreter has no capabilities there either."""
_FORBIDDEN = {
    # clone, fork, vfork, clone3; socket, socketpair; kill, tkill, rt_sigqueueinfo, rt_tgsigqueueinfo,
    # pidfd_send_signal; ptrace, process_vm_readv, process_vm_writev; unshare, setns, mount; bpf,
    # io_uring_setup, add_key, keyctl, userfaultfd, perf_event_open
    "x86_64": (
        0xC000003E,
        (
            *(56, 57, 58, 435, 41, 53, 62, 200, 129, 297, 424, 101, 310, 311, 272, 308, 165, 321),
            *(425, 248, 250, 323, 298),
        ),
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(220, 435, 198, 199, 129, 130, 138, 240, 424, 117, 270, 271, 97, 268, 40, 280),
            *(425, 217, 219, 282, 241),
        ),
    ),
}
_EPERM = 1
_OUTSIDE_ABI = 0x40000000
"""Numbers from here on are those of x32, which the list does not know."""


class LockedOut(Exception):
    """The program cannot lock itself in."""


def main(arguments: list[str]) -> None:
    """Lock in, and become the interpreter.

    Args:
        arguments: folder, bytes of memory, bytes of a file, seconds of CPU, bytes of the file system, form,
            descriptor of the pipe.
    """
    folder, memory, file_bytes, seconds, disk, form, pipe = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    interpreter = os.path.realpath(sys.executable)
    try:
        if form == "namespaces":
            _lock_in(libc, folder, int(disk))
        else:
            os.chdir(folder)
        _limit(int(memory), int(file_bytes), int(seconds))
        _filter_calls(libc)
    except (LockedOut, OSError, ValueError) as error:
        print(f"{error}", file=sys.stderr, flush=True)
        os._exit(_LOCKED_OUT)
    os.write(int(pipe), b"b")
    os.set_inheritable(int(pipe), False)
    os.execve(interpreter, [interpreter, "-I", "-S", "-"], {})


def _lock_in(libc: Any, folder: str, disk: int) -> None:
    """Leave users, processes, network and files of the machine; returns in the process that runs the code."""
    user, group = os.getuid(), os.getgid()
    _call(libc.unshare, "unshare", _USER | _PID | _NET | _FILES | _IPC | _HOST)
    for name, content in (
        ("setgroups", "deny"),
        ("uid_map", f"{_INSIDE} {user} 1"),
        ("gid_map", f"{_INSIDE} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)
    _wait_for(os.fork())
    # This is the first process of the namespace: when it ends, all others do.
    libc.prctl(_PARENT_DEATH, signal.SIGKILL, 0, 0, 0)
    _own_files(libc, folder, disk)
    _wait_for(os.fork())


def _wait_for(child: int) -> None:
    """End with the status of a child; returns in the child."""
    if child == 0:
        return
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else 128 - status)


def _own_files(libc: Any, folder: str, disk: int) -> None:
    """Make a file system in memory the root, with the interpreter in it, read only."""

    def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
        found = (source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None)
        _call(libc.mount, f"mount {target}", *found)

    mount("none", "/", "", _REC | _PRIVATE)
    mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV, f"size={disk},nr_inodes=1024,mode=755")
    real = os.path.realpath(sys.executable)
    wanted = {"/usr", "/lib", "/lib64", "/bin", os.path.realpath(sys.base_prefix), os.path.dirname(real)}
    bound: list[str] = []
    for path in sorted(wanted):
        inside = folder + path
        if not os.path.exists(path) or any(path.startswith(f"{parent}/") for parent in bound):
            continue
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
            continue
        os.makedirs(inside)
        mount(path, inside, "", _BIND | _REC)
        _read_only(libc, inside)
        bound.append(path)
    cache = "/etc/ld.so.cache"
    if os.path.exists(cache):
        os.makedirs(f"{folder}/etc")
        with open(cache, "rb") as source, open(folder + cache, "wb") as target:
            target.write(source.read())
    os.mkdir(f"{folder}/tmp")
    os.chroot(folder)
    os.chdir("/tmp")


def _read_only(libc: Any, path: str) -> None:
    """Make a mount and all below it read only (Linux 5.12)."""
    attributes = struct.pack("QQQQ", _RDONLY | _NOSUID, 0, 0, 0)
    here, recursive = -100, 0x8000
    _call(
        libc.syscall,
        f"read-only {path}",
        _MOUNT_SETATTR,
        here,
        path.encode(),
        recursive,
        attributes,
        ctypes.c_size_t(len(attributes)),
    )


def _limit(memory: int, file_bytes: int, seconds: int) -> None:
    for kind, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 1),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))


def _filter_calls(libc: Any) -> None:
    """Let forbidden system calls fail with EPERM, by a classic BPF program of the kernel's seccomp."""
    known = _FORBIDDEN.get(platform.machine())
    if known is None:
        raise LockedOut(f"system calls of {platform.machine()} are not known")
    architecture, numbers = known
    load, equal, above, answer = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | _EPERM, 0x80000000
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    code.append((above, len(numbers) + 1, 0, _OUTSIDE_ABI))
    code += [(equal, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    code += [(answer, 0, 0, allow), (answer, 0, 0, refuse)]
    packed = b"".join(struct.pack("HBBI", *each) for each in code)
    instructions = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("HP", len(code), ctypes.addressof(instructions))
    _call(libc.prctl, "no_new_privs", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call(libc.prctl, "seccomp", _SECCOMP, _SECCOMP_FILTER, program, 0, 0)


def _call(function: Callable[..., int], name: str, *arguments: Any) -> None:
    if function(*arguments) != 0:
        error = ctypes.get_errno()
        raise LockedOut(f"{name}: {os.strerror(error)}")


if __name__ == "__main__":
    main(sys.argv[1:])
