"""A machine's slice, asked of a local server that plays the metadata server."""

import contextlib
import http.server
import re
import socket
import threading

import pytest
import small_server

from scalerl_jax.machines import discovery
from scalerl_jax.machines.discovery import NotOnTpu, discover

CUBES = "\n".join(  # as a v4-256 has it, shortened
    [
        "ACCELERATOR_TYPE: 'v4-256'",
        "AGENT_BOOTSTRAP_IMAGE: 'gcr.io/images/instance_agent:stable'",
        "CHIPS_PER_HOST_BOUNDS: '2,2,1'",
        "HOST_BOUNDS: '2,2,8'",
        "NODE_ID: 'mine'",
        "TOPOLOGY: '4x4x8'",
        "TPU_TOPOLOGY_WRAP: 'true,true,true'",
        "WORKER_ID: '7'",
        "",
    ]
)


@contextlib.contextmanager
def metadata_server(attributes, *, flavor="Google", first=()):
    """Serve a machine's attributes; `first` are statuses said before that."""
    statuses, asked = list(first), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            prefix = "/computeMetadata/v1/instance/attributes/"
            asked.append(self.path.removeprefix(prefix))
            text = attributes.get(asked[-1])
            status = statuses.pop(0) if statuses else 404 if text is None else 200
            if self.headers["Metadata-Flavor"] != "Google":
                status = 403
            self.send_response(status)
            self.send_header("Metadata-Flavor", flavor)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, format, *args):
            pass

    with small_server.answering(Handler) as server:
        yield {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}, asked


def triples(count):
    return ",".join(f"unknown:unknown:10.0.0.{n}" for n in range(count))


def test_a_tpu_vm_of_a_cube_is_found():
    attributes = {
        "accelerator-type": "v5p-128",
        "agent-worker-number": "9",
        "worker-network-endpoints": triples(16),
        "tpu-env": "CHIPS_PER_HOST_BOUNDS: '2,2,1'\nTOPOLOGY: '4x4x4'\n",
    }
    with metadata_server(attributes) as (environment, asked):
        found = discover(environment)
    assert (found.slice.name, found.worker) == ("v5p:4x4x4", 9)
    assert found.addresses == tuple(f"10.0.0.{n}" for n in range(16))
    assert set(asked) == set(attributes)


def test_the_bounds_of_a_tpu_vm_suffice():
    attributes = {
        "tpu-env": CUBES,
        "worker-network-endpoints": ",".join(f"host-{n}" for n in range(32)),
    }
    with metadata_server(attributes) as (environment, _):
        found = discover(environment)
    assert (found.slice.name, found.worker, found.name) == ("v4:4x4x8", 7, "mine")
    assert found.addresses[31] == "host-31"


@pytest.mark.parametrize(
    "said, name, hosts",
    [
        pytest.param("", "v6e:2x4", 1, id="nothing said, one address"),
        pytest.param("", "v6e:2x4", 2, id="nothing said, two addresses"),
        pytest.param("CHIPS_PER_HOST_BOUNDS: '2,4,1'", "v6e:2x4", 1, id="one host"),
        pytest.param("CHIPS_PER_HOST_BOUNDS: '2,2,1'", "v6e:2x4", 2, id="two hosts"),
        pytest.param(
            "HOST_BOUNDS: '1,1,1'\nCHIPS_PER_HOST_BOUNDS: '4,2,1'\nTOPOLOGY: '2x4'",
            "v6e:4x2",
            1,
            id="the other way",
        ),
    ],
)
def test_eight_chips_are_one_host_or_two(said, name, hosts):
    attributes = {
        "accelerator-type": "v6e-8",
        "agent-worker-number": "0",
        "worker-network-endpoints": triples(hosts),
        "tpu-env": said,
    }
    with metadata_server(attributes) as (environment, _):
        found = discover(environment)
    assert (found.slice.name, found.slice.num_hosts) == (name, hosts)


def test_a_server_that_is_busy_is_asked_again(monkeypatch):
    monkeypatch.setattr(discovery, "PAUSE_S", 0.0)
    attributes = {"accelerator-type": "v6e-1", "worker-network-endpoints": "a"}
    with metadata_server(attributes, first=[503, 503]) as (environment, asked):
        assert discover(environment).slice.name == "v6e:1x1"
        assert asked[:3] == ["tpu-env"] * 3
    with (
        metadata_server(attributes, first=[503] * 3) as (environment, _),
        pytest.raises(NotOnTpu, match="answered 503"),
    ):
        discover(environment)


def test_no_proxy_is_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    attributes = {"accelerator-type": "v6e-1", "worker-network-endpoints": "a"}
    with metadata_server(attributes) as (environment, _):
        assert discover(environment).addresses == ("a",)


@pytest.mark.parametrize(
    "environment, name, worker",
    [
        pytest.param(
            {
                "TPU_ACCELERATOR_TYPE": "v6e-16",
                "TPU_TOPOLOGY": "4x4",
                "TPU_WORKER_ID": "2",
                "TPU_WORKER_HOSTNAMES": "a,b,c,d",
                "TPU_NAME": "mine",
            },
            "v6e:4x4",
            2,
            id="v6e",
        ),
        pytest.param(
            {
                "TPU_ACCELERATOR_TYPE": "tpu-v5p-slice",
                "TPU_TOPOLOGY": "2x2x2",
                "TPU_WORKER_ID": "1",
                "TPU_WORKER_HOSTNAMES": "a, b",
            },
            "v5p:2x2x2",
            1,
            id="the type of a node",
        ),
        pytest.param(
            {
                "TPU_ACCELERATOR_TYPE": "v5litepod-8",
                "TPU_TOPOLOGY": "2x4",
                "TPU_CHIPS_PER_HOST_BOUNDS": "4,2,1",
                "TPU_WORKER_ID": "0",
                "TPU_WORKER_HOSTNAMES": "localhost",
            },
            "v5e:4x2",
            0,
            id="eight chips that lie the other way",
        ),
        pytest.param(
            {
                "TPU_ACCELERATOR_TYPE": "v5litepod-8",
                "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
                "TPU_WORKER_HOSTNAMES": "localhost",
            },
            "v5e:2x4",
            0,
            id="one host need not say which",
        ),
    ],
)
def test_a_pod_of_kubernetes_is_found(environment, name, worker):
    found = discover(environment)
    assert (found.slice.name, found.worker) == (name, worker)
    assert found.addresses == tuple(
        re.split(", ?", environment["TPU_WORKER_HOSTNAMES"])
    )
    assert found.name == environment.get("TPU_NAME", "")


def test_a_machine_without_a_tpu_is_told_so_in_one_line():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = {"GCE_METADATA_IP": f"127.0.0.1:{closed.getsockname()[1]}"}
        with pytest.raises(NotOnTpu, match="^no TPU here: .*refused.*; start") as error:
            discover(nobody)
    assert "\n" not in str(error.value)
    with (
        metadata_server({}) as (environment, _),
        pytest.raises(NotOnTpu, match="has no accelerator type"),
    ):
        discover(environment)
    with pytest.raises(NotOnTpu, match="TPU_SKIP_MDS_QUERY"):
        discover({"TPU_SKIP_MDS_QUERY": "1"})


def test_another_cloud_is_no_tpu():
    with (
        metadata_server({"tpu-env": "x"}, flavor="Other") as (environment, _),
        pytest.raises(NotOnTpu, match="not Google's metadata server"),
    ):
        discover(environment)
    with (
        metadata_server({}, flavor="Other") as (environment, _),
        pytest.raises(NotOnTpu, match="answered 404"),
    ):
        discover(environment)


def test_a_server_that_says_nothing_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {"GCE_METADATA_IP": f"127.0.0.1:{silent.getsockname()[1]}"}
        with pytest.raises(NotOnTpu, match=r"within 0\.2 s"):
            discover(environment, timeout_s=0.2)


@pytest.mark.parametrize(
    "begun",
    [
        pytest.param(
            b"HTTP/1.0 200 OK\r\nMetadata-Flavor: Google\r\n\r\n", id="the body"
        ),
        pytest.param(b"HTTP/1.0 200 OK\r\nMetadata-Flavor: Goo", id="a header"),
        pytest.param(b"HTTP/1.0 200 O", id="the first line"),
    ],
)
def test_a_server_that_never_ends_is_not_waited_for(begun):
    def drip(server):
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(begun)
            while not done.wait(0.05):
                connection.sendall(b"x")

    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        environment = {"GCE_METADATA_IP": f"127.0.0.1:{server.getsockname()[1]}"}
        try:
            with pytest.raises(NotOnTpu, match="did not answer within 0.3 s"):
                discover(environment, timeout_s=0.3)
        finally:
            done.set()
            thread.join(10)


@pytest.mark.parametrize(
    "changed, said",
    [
        pytest.param(
            {"worker-network-endpoints": triples(1)},
            "1 hosts (10.0.0.0), but v6e:4x4 has 4",
            id="an address for one host of four",
        ),
        pytest.param(
            {"worker-network-endpoints": None}, "names 0 hosts (none)", id="no address"
        ),
        pytest.param(
            {"worker-network-endpoints": "a:b,c:d"}, "has 'a:b'", id="half an address"
        ),
        pytest.param(
            {"agent-worker-number": "4"}, "worker '4' of v6e:4x4", id="a fifth worker"
        ),
        pytest.param(
            {"agent-worker-number": None}, "worker '' of v6e:4x4", id="no worker"
        ),
        pytest.param(
            {"accelerator-type": "v3-32"},
            "= 'v3-32'",
            id="a v3",
        ),
        pytest.param(
            {"tpu-env": "TOPOLOGY: '3x3'"},
            "3x3 is no slice of v6e",
            id="a topology that is none",
        ),
        pytest.param(
            {"tpu-env": "TOPOLOGY: 'large'"}, "= 'large': write", id="no topology"
        ),
        pytest.param(
            {"tpu-env": "CHIPS_PER_HOST_BOUNDS: '2,4,1'"},
            "host = 2x4 chips is no host of v6e:4x4",
            id="a host of another slice",
        ),
        pytest.param(
            {"tpu-env": "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '2'"},
            "MEGASCALE_NUM_SLICES = '2', MEGASCALE_SLICE_ID = '2'",
            id="a third slice of two",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(changed, said):
    attributes = {
        "accelerator-type": "v6e-16",
        "agent-worker-number": "0",
        "worker-network-endpoints": triples(4),
    }
    with (
        metadata_server(attributes | changed) as (environment, _),
        pytest.raises(ValueError, match=re.escape(said)),
    ):
        discover(environment)
