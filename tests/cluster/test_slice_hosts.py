"""One command on every host of a slice: who starts Ray's head, and who joins it."""

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import small_run
from small_processes import free_port

from scalerl_jax.cluster import slice_hosts
from scalerl_jax.cluster.placement import HostNode
from scalerl_jax.cluster.slice_hosts import SliceHost, await_hosts, slice_cluster
from scalerl_jax.machines.discovery import discover

_LIMIT_S = 120


def told(worker, *, addresses="localhost,localhost", name="pod"):
    """What Kubernetes tells a host of a v5p:2x2x2."""
    return {
        "TPU_WORKER_HOSTNAMES": addresses,
        "TPU_WORKER_ID": str(worker),
        "TPU_ACCELERATOR_TYPE": "tpu-v5p-slice",
        "TPU_TOPOLOGY": "2x2x2",
        "TPU_NAME": name,
    }


def host_of(worker, **changes):
    return SliceHost(found=discover(told(worker, **changes)), port=7000)


def test_worker_0_starts_the_head_and_the_others_join_it():
    addresses = "10.0.0.4,10.0.0.5"
    first, second = (host_of(worker, addresses=addresses) for worker in (0, 1))
    own = [
        *("--node-ip-address=10.0.0.4", '--resources={"TPU": 4}'),
        *("--disable-usage-stats", "--block"),
    ]
    head = ["--head", "--port=7000", "--include-dashboard=false"]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start"]
    assert first.command() == [*start, *head, *own]
    own[0] = "--node-ip-address=10.0.0.5"
    assert second.command() == [*start, "--address=10.0.0.4:7000", *own]


def test_a_name_of_this_host_that_nobody_knows_is_told():
    host = host_of(1, addresses="localhost,no-such-host.invalid")
    with pytest.raises(RuntimeError, match="^worker 1 .*no-such-host.invalid, cannot"):
        host.command()


def test_ray_is_told_of_the_slice_in_its_own_words():
    inherited = {"PATH": "/bin", "TPU_WORKER_ID": "0"}
    environment = host_of(1).environment(inherited)
    assert environment == {
        "PATH": "/bin",
        "TPU_NAME": "pod",
        "TPU_WORKER_ID": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-16",
        "TPU_TOPOLOGY": "2x2x2",
    }
    environment = host_of(1, name="").environment({"RAY_AUTH_MODE": "token"})
    assert environment["TPU_NAME"] == "slice-v5p-16"
    assert environment["RAY_AUTH_MODE"] == "token"


def test_of_several_slices_the_first_has_the_head_and_each_a_name_of_its_own():
    def among(number, worker):
        several = {
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": str(number),
            "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.4:8080",
        }
        addresses = ("10.0.0.4,10.0.0.5", "10.0.1.4,10.0.1.5")[number]
        said = told(worker, addresses=addresses) | several
        return SliceHost(found=discover(said), port=7000)

    hosts = {(n, worker): among(n, worker) for n in (0, 1) for worker in (0, 1)}
    assert {at for at, host in hosts.items() if "--head" in host.command()} == {(0, 0)}
    assert {host.head for host in hosts.values()} == {"10.0.0.4:7000"}
    names = [host.environment({})["TPU_NAME"] for host in hosts.values()]
    assert names == ["pod-0", "pod-0", "pod-1", "pod-1"]
    joined = [node(f"pod-{n}", worker) for n, worker in hosts]
    await_hosts(hosts[0, 0], lambda: joined, timeout_s=0.0)
    words = r"all but 3 of the 4\) of v5p:2x2x2 have not joined"
    with pytest.raises(TimeoutError, match=words):
        await_hosts(hosts[0, 0], lambda: joined[:3], timeout_s=0.0)


def test_a_host_that_finds_no_head_says_where_it_looked():
    port = free_port()
    words = rf"worker 1 of v5p:2x2x2 .* localhost:{port}"
    with (
        pytest.raises(TimeoutError, match=words),
        slice_cluster(told(1), timeout_s=0.0, port=port),
    ):
        raise AssertionError("it is no host of a cluster")


def test_a_port_that_is_taken_is_told_before_ray_starts():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with (
            pytest.raises(RuntimeError, match=f"port {port} of worker 0"),
            slice_cluster(told(0), timeout_s=0.0, port=port),
        ):
            raise AssertionError("another cluster is there")


def node(name, worker):
    return HostNode(
        slice=name,
        worker=worker,
        address="10.0.0.4",
        chips=4,
        type="v5p-16",
        topology="2x2x2",
        labels={},
    )


def test_hosts_that_do_not_come_are_named():
    came = node("pod", 0)
    with pytest.raises(TimeoutError, match="workers 1 of v5p:2x2x2 have not joined"):
        await_hosts(host_of(0), lambda: [came], timeout_s=0.0)
    later = [[came], [came], [came, node("pod", 1)]]
    await_hosts(host_of(0), lambda: later.pop(0), timeout_s=60.0)
    assert not later


def test_a_machine_without_tpu_says_so_in_one_line(tmp_path):
    pytest.importorskip("ray")
    process = small_run.start(
        *("-m", "scalerl_jax.main", "--ray=slice"),
        *small_run.arguments(tmp_path / "x"),
        environment={"TPU_SKIP_MDS_QUERY": "1", "RAY_AUTH_TOKEN": "0" * 64},
    )
    _, errors = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 1
    assert errors.startswith("error: no TPU here") and errors.count("\n") == 1, errors
    assert not (tmp_path / "x").exists()


STARTER = """
import os, sys, time
from scalerl_jax.cluster.parent_watch import watching_parent
command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); "
           "time.sleep(600)"]
with watching_parent(command, environment=os.environ, output=sys.stdout) as process:
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_command_ends_with_its_starter_even_if_that_one_is_killed():
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER],
        stdout=subprocess.PIPE,
        text=True,
        cwd=small_run.ROOT,
    )
    with starter:
        command = int(starter.stdout.readline())
        os.kill(command, 0)  # it is there
        starter.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + _LIMIT_S
        while is_there(command):
            assert time.monotonic() < deadline
            time.sleep(0.05)


# A host whose node is a process that only waits.
FOLLOWER = """
import logging, os, sys
from scalerl_jax.process.preemption import end_at_signals
end_at_signals()
from scalerl_jax.cluster.slice_hosts import SliceHost, serve
from scalerl_jax.machines.discovery import discover
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
port, file = sys.argv[1:]
NODE = "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()} ');"
NODE += "time.sleep(600)"
class Host(SliceHost):
    def command(self):
        return [sys.executable, "-c", NODE, file]
serve(Host(found=discover(os.environ), port=int(port)), os.environ, timeout_s=100)
"""


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_host_stays_at_sigterm_until_the_head_has_saved_the_run(
    tmp_path, number, status
):
    file = tmp_path / "node"
    with socket.create_server(("localhost", 0)) as head:
        port = head.getsockname()[1]
        process = small_run.start("-c", FOLLOWER, port, file, environment=told(1))
        deadline = time.monotonic() + _LIMIT_S
        while not (file.exists() and file.read_text().endswith(" ")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        node = int(file.read_text())
        assert "joins the cluster" in process.stdout.readline()
        process.send_signal(number)
        if number == signal.SIGTERM:
            assert "this host stays until" in process.stdout.readline()
            assert is_there(node) and process.poll() is None
            head.close()
        said, errors = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == status, said + errors
    assert not is_there(node)


@pytest.fixture
def lives(monkeypatch):
    """Nodes that live so long and say so much; by the clock's time then."""
    now, nodes, begun = [0.0], [], []

    @contextlib.contextmanager
    def node(host, inherited):
        begun.append(now[0])
        yield mock.MagicMock(), io.BytesIO(nodes[0][1])

    def wait_for_end(*arguments):
        now[0] += nodes.pop(0)[0]
        return not nodes  # then the head is gone

    def pause(seconds):
        now[0] += seconds

    clock = mock.Mock(monotonic=lambda: now[0], sleep=pause)
    monkeypatch.setattr(slice_hosts, "time", clock)
    monkeypatch.setattr(slice_hosts, "_node", node)
    monkeypatch.setattr(slice_hosts, "_wait_for_end", wait_for_end)
    monkeypatch.setattr(slice_hosts, "answers", lambda head: now[0] >= 60.0)
    return nodes, begun


def test_a_node_that_dies_soon_after_it_joined_joins_again(lives):
    nodes, begun = lives
    joined = b"--------\nRay runtime started.\n--------\nkilled\n"
    nodes += [(250.0, joined)] * 4
    slice_hosts.serve(host_of(1), {}, timeout_s=300.0)
    assert begun == [60.0, 311.0, 562.0, 813.0] and not nodes
    ray = pytest.importorskip("ray")  # these are its words
    command = Path(ray.__file__).parent / "scripts/scripts.py"
    assert slice_hosts._STARTED in command.read_text()


@pytest.mark.parametrize(
    ("life_s", "words"), [(70.0, b"no GCS\n"), (2.0, b"Ray runtime started.\nno GCS")]
)
def test_a_node_that_never_joins_gives_up_in_time(lives, life_s, words):
    nodes, begun = lives
    nodes += [(life_s, words)] * 1000
    with pytest.raises(RuntimeError, match="timeout_s = 300: no GCS"):
        slice_hosts.serve(host_of(1), {}, timeout_s=300.0)
    assert begun[-1] <= 300.0 and len(begun) > 1


def is_there(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def alive(ray):
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def kill_raylet(argument):
    """Kill the raylet of the `ray start` below this process that has an argument."""
    import psutil

    below = psutil.Process().children(recursive=True)
    # Other tests leave processes that have ended, and that nobody has waited for.
    running = [each for each in below if each.status() != psutil.STATUS_ZOMBIE]
    (start, *_) = (each for each in running if argument in each.cmdline())
    (raylet,) = (
        each for each in start.children(recursive=True) if each.name() == "raylet"
    )
    raylet.kill()


@pytest.mark.slow
def test_the_hosts_of_a_slice_make_a_cluster_and_leave_it_with_its_head(monkeypatch):
    """Two hosts on one machine, as two environments."""
    ray = pytest.importorskip("ray")
    # A token that lies on this machine would be asked for by the hosts' own processes;
    # this one may have read its environment before.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    from scalerl_jax.cluster import session
    from scalerl_jax.cluster.placement import slices_of

    port, ended = free_port(), []

    def take_part(worker):
        return session.connected(
            "slice",
            timeout_s=_LIMIT_S,
            environment=dict(os.environ) | told(worker),
            port=port,
        )

    def join():
        with take_part(1) as cluster:
            ended.append(cluster)

    other = threading.Thread(target=join, daemon=True)
    other.start()
    with take_part(0) as cluster:
        assert cluster.kind == "tpu"
        (reached,) = slices_of(cluster.hosts())
        assert reached.name == "pod"
        assert reached.slice.name == "v5p:2x2x2"
        assert [host.chips for host in reached.hosts] == [4, 4]
        assert other.is_alive() and not ended
        # The node of worker 1 is lost; the host makes another one, and takes its place.
        nodes = alive(ray)
        kill_raylet(f"--address=localhost:{port}")
        deadline = time.monotonic() + _LIMIT_S
        while len(now := alive(ray)) != 2 or now == nodes:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        (again,) = slices_of(cluster.hosts())
        assert [host.labels for host in again.hosts] == [
            host.labels for host in reached.hosts
        ]
    other.join(_LIMIT_S)
    assert ended == [None], "it ends without an error"
    assert not slice_hosts.answers(f"localhost:{port}")
