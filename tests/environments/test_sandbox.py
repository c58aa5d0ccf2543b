"""Escape attempts: each is a solution that tries, and a host that it must not reach."""

import os
import shutil
import socket
import subprocess
import sys
import time

import psutil
import pytest
from small_sandbox import sandboxed

from scalerl_jax.environments import sandbox, seccomp
from scalerl_jax.environments.sandbox import (
    OutOfTime,
    Sandbox,
    SandboxError,
    SandboxLimits,
)

pytestmark = sandboxed


@pytest.fixture
def run():
    """Runs a program: its exit code and output; None if it had to be killed."""
    opened = []

    def run(source, *, wall_s=10.0, stdin="", **limits):
        box = Sandbox("solution", SandboxLimits(cpu_s=78, **limits))
        opened.append(box)
        box.await_ready()
        deadline = time.monotonic() + wall_s
        try:
            assert box.channel.ask({"source": source}, deadline=deadline) == {
                "readable": True
            }
            request = {"do": "run", "stdin": stdin}
            reply = box.channel.ask(request, deadline=deadline, most=2**24)
        except OutOfTime:
            return None
        finally:
            box.close()
        return tuple(reply["value"])

    yield run
    for box in opened:
        assert box._process.returncode is not None


def processes_with(marker):
    """Processes of this machine whose command line holds a text."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                if marker in file.read():
                    found.append(pid)
        except OSError:
            continue
    return found


def wait_until_gone(marker):
    end = time.monotonic() + 10.0
    while processes_with(marker):
        assert time.monotonic() < end, "the sandbox lives on"
        time.sleep(0.02)


def test_a_program_reads_its_input_and_its_output_comes_back(run):
    source = "import sys\nname = input()\nprint('hello', name)\nprint(sys.stdin.read())"
    assert run(source, stdin="\u00e9lise\n1 2\n3") == (0, "hello \u00e9lise\n1 2\n3\n")


def test_packages_can_be_imported_where_they_are_given(run, tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "a_package.py").write_text("value = 7")
    source = "import a_package\nprint(a_package.value)"
    assert run(source) == (1, "")
    assert run(source, packages=str(tmp_path)) == (0, "7\n")


@pytest.mark.parametrize(
    "source, code",
    [
        ("exit(3)", 3),
        ("import sys; sys.exit()", 0),
        ("raise SystemExit('no')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_the_exit_code_is_the_program_s(run, source, code):
    assert run(source) == (code, "")


def test_no_process_can_be_started_and_few_threads(run):
    if seccomp.program() is None:
        pytest.skip("no filter of system calls for this kind of processor")
    source = """
import ctypes, multiprocessing, os, platform, subprocess, threading
libc = ctypes.CDLL(None)
fork, vfork, clone = (57, 58, 56) if platform.machine() == "x86_64" else (220,) * 3
ways = {
    "fork": os.fork,
    "spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "subprocess": lambda: subprocess.run(["/bin/true"]),
    "multiprocessing": lambda: multiprocessing.Process(target=print).start(),
}
for name, start in ways.items():
    try:
        print(name, start())
    except PermissionError:
        pass
# 17 is SIGCHLD, 0x100 shares memory and is no thread; 435 is clone3.
for call in [(fork, 17), (vfork, 17), (clone, 17), (clone, 0x111), (435, 0, 0)]:
    if libc.syscall(*call, 0, 0, 0) != -1:
        print(call)
over = threading.Event()
started = []
try:
    for _ in range(200):
        started.append(threading.Thread(target=over.wait))
        started[-1].start()
except RuntimeError:
    print("threads", 4 < len(started) < 16)
over.set()
"""
    assert run(source) == (0, "threads True\n")


@pytest.mark.parametrize("do", ["run", "define"])
def test_memory_is_that_of_the_whole_sandbox(do):
    source = """
import os, time
for _ in range(13):
    try:
        if os.fork() == 0:
            break
    except OSError:
        pass
held = []
try:
    while True:
        held.append(bytes(range(256)) * 2**10)
except MemoryError:
    time.sleep(60)
"""
    box = Sandbox("solution", SandboxLimits(cpu_s=20, memory_mib=64))
    try:
        box.await_ready()
        end = time.monotonic() + 1.5
        box.channel.ask({"source": source}, deadline=end)
        box.channel.send(
            {"do": do} | ({"stdin": ""} if do == "run" else {}), deadline=end
        )
        most = 0
        while time.monotonic() < end:
            inside = psutil.Process(box._process.pid).children(recursive=True)
            most = max(most, sum(each.memory_info().rss for each in inside))
            time.sleep(0.05)
    finally:
        box.close()
    assert 40 * 2**20 < most < 100 * 2**20


def test_no_zombie_is_left_of_a_sandbox_or_of_a_verifier_that_is_killed():
    program = """
import psutil
from scalerl_jax.environments import verdict
from scalerl_jax.environments.judges import code
from scalerl_jax.environments.verdict import Verifier
from scalerl_jax.environments.pool import VerifierPool

verdict.adopt()  # the first process of a machine may reap nothing either
limits = {"cpu_s": 20, "wall_s": 20.0, "memory_mib": 512}
tests = {"kind": "asserts", "tests": "assert f() == 1"}
for body in ("return 1", "import os; os._exit(0)"):
    answer = "```\\ndef f():\\n  " + body + "\\n```"
    print(code.judge("any", answer, {"tests": tests}, **limits).status)
print(psutil.Process().children())
pool = VerifierPool(
    score="math:exp",
    named={"code": Verifier("scalerl_jax.environments.judges.code:judge", limits)},
    timeout_s=1.5,
)
answer = "```\\nimport time; time.sleep(60)\\n```"
pool.submit(0, "any", [answer], {"verifier": "code", "tests": tests})
while pool.pending:
    pool.wait(10.0)
    for found in pool.poll():
        print(*found.statuses)
pool.close()
print(psutil.Process().children())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    )
    expected = ["correct", "wrong", "[]", "verifier_timeout", "[]"]
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize(
    "grab",
    ["x = bytearray(2**31)", "x = []\nwhile True: x.append(bytearray(2**20))"],
    ids=["at once", "bit by bit"],
)
def test_a_memory_bomb_is_its_own_error(run, grab):
    source = f"try:\n  exec({grab!r})\nexcept MemoryError:\n  print('no more')"
    assert run(source, memory_mib=256) == (0, "no more\n")


def test_memory_that_no_limit_counts_cannot_be_had(run):
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.shmget(0, 2**30, 0o1600), ctypes.get_errno())
try:
    os.memfd_create("x")
except OSError as error:
    print(error.errno)
"""
    if seccomp.program() is None:
        pytest.skip("no filter of system calls for this kind of processor")
    assert run(source) == (0, "-1 1\n1\n")


def test_a_loop_that_ignores_signals_is_killed_and_gone(run):
    source = """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
"""
    assert run(source, wall_s=1.0) is None
    wait_until_gone('"RLIMIT_CPU": 78')


def test_nothing_can_be_written_but_a_small_tmp_of_its_own(run, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("whole")
    source = f"""
import os, sys
places = ["/x", "/usr/x", "/usr/lib/x", "/etc/x", "/dev/x", "/dev/shm/x",
          "/harness.py", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/root/x",
          {str(victim)!r}, os.path.join(sys.base_prefix, "x"), os.__file__]
for place in places:
    try:
        open(place, "r+" if os.path.exists(place) else "w").write("broken")
        print("wrote", place)
    except OSError:
        pass
written = 0
try:
    for number in range(100):
        with open(f"/tmp/{{number}}", "wb") as file:
            written += file.write(bytes(2**22))
except OSError as error:
    os.remove("/tmp/0")  # room for what is printed
    print(error.strerror, written <= 2**26)
"""
    before = set(os.listdir("/tmp"))
    assert run(source) == (0, "No space left on device True\n")
    assert victim.read_text() == "whole"
    assert not {"0", "1"} & (set(os.listdir("/tmp")) - before)


def test_neither_files_nor_environment_of_the_host_can_be_read(
    run, tmp_path, monkeypatch
):
    monkeypatch.setenv("A_SECRET_OF_THE_HOST", "sesame")
    secret = tmp_path / "secret"
    secret.write_text("sesame")
    source = f"""
import glob, os
for place in [{str(secret)!r}, {os.getcwd()!r}, "/etc/passwd", "/etc/shadow", "/home",
              "/var", "/sys", "/run", "/proc/1/root/etc", "/proc/1/cwd/etc"]:
    if os.path.exists(place):
        print("sees", place)
for place in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
    try:
        if b"sesame" in open(place, "rb").read():
            print("reads", place)
    except OSError:
        pass
print(sorted(os.environ), sorted(os.listdir("/tmp")))
"""
    expected = sorted([*sandbox._ENVIRONMENT, "PWD"])
    code, output = run(source)
    seen = output.replace("'LC_CTYPE', ", "")  # Python's own
    assert (code, seen) == (0, f"{expected} ['input', 'output']\n")


def test_there_is_no_network(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = f"""
import socket
for family, address in [(socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})),
                        (socket.AF_INET, ("8.8.8.8", 53)),
                        (socket.AF_UNIX, "\\0an-abstract-socket")]:
    try:
        socket.socket(family).connect(address)
        print("connected", address)
    except OSError:
        print("refused")
print([line.split(":")[0].strip() for line in open("/proc/net/dev")][2:])
"""
        with socket.socket(socket.AF_UNIX) as abstract:
            abstract.bind("\0an-abstract-socket")
            abstract.listen()
            code, output = run(source)
    assert (code, output.replace(", 'sit0'", "")) == (0, "refused\n" * 3 + "['lo']\n")


def test_no_kind_of_socket_can_be_made_that_a_network_namespace_does_not_contain(run):
    if seccomp.program() is None:
        pytest.skip("no filter of system calls for this kind of processor")
    source = """
import socket
made = set()
for family in range(64):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            socket.socket(family, kind).close()
            made.add(family)
        except OSError:
            pass
print(made <= {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6})
"""
    assert run(source) == (0, "True\n")


@pytest.mark.parametrize("user", [0, 1000])
def test_the_memory_of_no_other_process_can_be_opened(run, monkeypatch, user):
    # The sandbox of another user than root has one user for all its processes.
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: user)
    try:
        sandbox.check()
    except SandboxError as error:  # root may make it without a user namespace
        pytest.skip(str(error))
    source = """
import os
print(len(open("/dev/stdin").read()))
for pid in {1, os.getppid(), os.getpid() - 1}:
    for way in ("rb", "r+b"):
        try:
            open(f"/proc/{pid}/mem", way)
            print("opened", pid, way)
        except OSError:
            pass
"""
    assert run(source, stdin="four") == (0, "4\n")


def test_no_process_of_the_host_can_be_seen_signalled_or_traced(run):
    pid = os.getpid()
    source = f"""
import ctypes, os, signal
print(len([name for name in os.listdir("/proc") if name.isdigit()]) < 6)
for target in [{pid}, {os.getppid()}]:
    try:
        os.kill(target, signal.SIGKILL)
        print("signalled", target)
    except ProcessLookupError:
        pass
libc = ctypes.CDLL(None, use_errno=True)
for target in [{pid}, 1, os.getppid()]:
    print(libc.ptrace(16, target, 0, 0), end=" ")
"""
    assert run(source) == (0, "True\n-1 -1 -1 ")


def test_it_has_no_rights_and_gets_none(run):
    source = """
import ctypes, os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print([status[name].strip() for name in ("CapPrm", "CapEff", "NoNewPrivs", "Seccomp")])
libc = ctypes.CDLL(None)
print(os.getuid() != 0, libc.unshare(0x10000000), libc.setns(0, 0), libc.mount(0, 0, 0))
for give in (os.setuid, os.setgid):
    try:
        give(0)
        print("became root")
    except OSError:
        pass
import resource
try:
    resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))
    print("raised a limit")
except (OSError, ValueError):
    pass
"""
    filtered = "2" if seccomp.program() else "0"
    none = "0" * 16
    rights = f"['{none}', '{none}', '1', '{filtered}']"
    assert run(source) == (0, f"{rights}\nTrue -1 -1 -1\n")


def test_what_prints_gigabytes_is_stopped_at_a_few_megabytes(run):
    code, output = run("while True: print('x' * 10**6)", file_mib=2)
    assert code == 1 and len(output) <= 2 * 2**20


def test_a_message_beyond_the_limit_is_not_read():
    box = Sandbox("solution", SandboxLimits(cpu_s=20))
    try:
        box.await_ready()
        deadline = time.monotonic() + 10.0
        source = "def f(): return 'x' * 10**7"
        box.channel.ask({"source": source}, deadline=deadline)
        box.channel.ask({"do": "define"}, deadline=deadline)
        request = {
            "do": "perform",
            "operation": "call",
            "arguments": {"list": [{"expression": "f"}]},
            "named": {"dict": []},
        }
        with pytest.raises(EOFError, match="is over 1048576"):
            box.channel.ask(request, deadline=deadline, most=2**20)
    finally:
        box.close()


def test_sandboxes_die_with_the_process_that_opened_them(tmp_path):
    program = """
import time
from scalerl_jax.environments.sandbox import SandboxLimits, Sandbox
box = Sandbox("solution", SandboxLimits(cpu_s=77))
box.await_ready()
print("ready", flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        assert processes_with('"RLIMIT_CPU": 77')
        process.kill()
    wait_until_gone('"RLIMIT_CPU": 77')


def test_without_bubblewrap_nothing_is_run(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        Sandbox("solution", SandboxLimits(cpu_s=1))


def test_what_bubblewrap_complains_of_is_said(tmp_path, monkeypatch):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permission to make a namespace' >&2\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert shutil.which("bwrap") == str(fake)
    with pytest.raises(SandboxError, match="No permission to make a namespace"):
        sandbox.check()
