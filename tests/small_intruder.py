"""What others find of a process and those below it: sockets, and a second user."""

import ipaddress
import os
import subprocess
import sys

import psutil
import pytest

NOBODY = 65534


def listening(process):
    """Name and address of each socket that the process or one below it listens at."""
    found = set()
    for each in (psutil.Process(process), *psutil.Process(process).children(True)):
        try:
            found |= {
                (each.name(), socket.laddr.ip)
                for socket in each.net_connections(kind="inet")
                if socket.status == psutil.CONN_LISTEN or not socket.raddr
            }
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has ended meanwhile
    return found


def open_to_others(sockets):
    """Those of these sockets that are not at this machine's own addresses."""

    def is_own(address):
        parsed = ipaddress.ip_address(address)
        mapped = getattr(parsed, "ipv4_mapped", None)  # ::ffff:127.0.0.1
        return (mapped or parsed).is_loopback

    return {(name, address) for name, address in sockets if not is_own(address)}


# The interpreter may lie where the other user cannot go, so it starts as ours.
_CHANGE = """
import importlib, os, sys
for name in sys.argv.pop(1).split(","):
    importlib.import_module(name)
user = int(sys.argv.pop(1))
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
"""


def as_another_user(code, *arguments, modules="os", environment=None, user=NOBODY):
    """Run Python as a user who has nothing to do with ours; skips where none may be.

    These modules are imported before, with what they import.
    """
    if os.geteuid() != 0:
        pytest.skip("this process may not become another user")
    kept = {
        name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ
    }
    return subprocess.run(
        [sys.executable, "-c", _CHANGE + code, modules, str(user), *arguments],
        env=kept | {"HOME": "/nonexistent"} | (environment or {}),
        capture_output=True,
        text=True,
        cwd="/",
        timeout=120,
    )
