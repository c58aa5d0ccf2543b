"""A filter of system calls for the sandbox: those that no solution needs.

It is a second wall behind the namespaces.  Refused calls fail with EPERM: tracing
and reading other processes, new namespaces and mounts, keys, kernel modules and
programs, memory that no limit of a process counts (memfd, System V), and sockets other
than IP's and local ones: no network namespace contains a virtual machine's (vsock).

The harness sets a second filter before a solution runs, which refuses new processes.
Threads share their process's memory, so that its limit is the whole sandbox's.
"""

import platform
import struct
from typing import NamedTuple

_LOAD, _EQUAL, _ALL_BITS, _RETURN = 0x20, 0x15, 0x45, 0x06  # classic BPF
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_EPERM, _ENOSYS = 0x00050000 | 1, 0x00050000 | 38
_EAFNOSUPPORT = 0x00050000 | 97
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data
_CLONE_NEWUSER, _CLONE_THREAD = 0x10000000, 0x00010000
_UNIX, _INET, _INET6 = 1, 2, 10  # linux/socket.h
_X32 = 0x40000000  # the other calling convention of x86-64
_CLONE3 = 435  # its flags cannot be seen here; the C library falls back on clone
# Beyond 424, the numbers of all architectures agree.
_NEWER = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 440, 442, 447)


class _Calls(NamedTuple):
    """The numbers of an architecture (linux/audit.h, asm/unistd.h)."""

    architecture: int
    clone: int
    socket: int
    forks: tuple[int, ...]  # fork and vfork, if the architecture has them
    refused: tuple[int, ...]


_BY_MACHINE = {
    "x86_64": _Calls(
        architecture=0xC000003E,
        clone=56,
        socket=41,
        forks=(57, 58),
        # ptrace process_vm_readv process_vm_writev kcmp unshare setns mount umount2
        # pivot_root chroot add_key request_key keyctl bpf perf_event_open userfaultfd
        # kexec_load kexec_file_load init_module finit_module delete_module
        # open_by_handle_at memfd_create memfd_secret shmget msgget semget
        refused=(101, 310, 311, 312, 272, 308, 165, 166, 155, 161, 248, 249, 250)
        + (321, 298, 323, 246, 320, 175, 313, 176, 304, 319, 29, 68, 64),
    ),
    "aarch64": _Calls(
        architecture=0xC00000B7,
        clone=220,
        socket=198,
        forks=(),
        refused=(117, 270, 271, 272, 97, 268, 40, 39, 41, 51, 217, 218, 219)
        + (280, 241, 282, 104, 294, 105, 273, 106, 265, 279, 194, 186, 190),
    ),
}


def program() -> bytes | None:
    """Return the filter for this machine, as bwrap's --seccomp reads it, or None."""
    calls = _BY_MACHINE.get(platform.machine())
    if calls is None:
        return None
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_EQUAL, calls.architecture, on_true=1),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        *_refuse(_ALL_BITS, _X32, _EPERM),
        *_refuse(_EQUAL, _CLONE3, _ENOSYS),
    ]
    for number in calls.refused + _NEWER:
        lines += _refuse(_EQUAL, number, _EPERM)
    lines += [
        _line(_EQUAL, calls.socket, on_false=6),
        _line(_LOAD, _FIRST_ARGUMENT),
        _line(_EQUAL, _UNIX, on_true=3),
        _line(_EQUAL, _INET, on_true=2),
        _line(_EQUAL, _INET6, on_true=1),
        _line(_RETURN, _EAFNOSUPPORT),
        _line(_RETURN, _ALLOW),
        _line(_EQUAL, calls.clone, on_false=3),
        _line(_LOAD, _FIRST_ARGUMENT),
        *_refuse(_ALL_BITS, _CLONE_NEWUSER, _EPERM),
        _line(_RETURN, _ALLOW),
    ]
    return b"".join(lines)


def one_process() -> bytes | None:
    """Return the filter that allows threads but no child process, or None."""
    calls = _BY_MACHINE.get(platform.machine())
    if calls is None:
        return None
    lines = [_line(_LOAD, _NUMBER)]
    for number in calls.forks:
        lines += _refuse(_EQUAL, number, _EPERM)
    lines += [
        _line(_EQUAL, calls.clone, on_false=3),
        _line(_LOAD, _FIRST_ARGUMENT),
        _line(_ALL_BITS, _CLONE_THREAD, on_true=1),
        _line(_RETURN, _EPERM),
        _line(_RETURN, _ALLOW),
    ]
    return b"".join(lines)


def _line(code: int, value: int, *, on_true: int = 0, on_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, on_true, on_false, value)


def _refuse(test: int, value: int, result: int) -> list[bytes]:
    return [_line(test, value, on_false=1), _line(_RETURN, result)]
