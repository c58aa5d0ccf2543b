"""The connection to a Ray cluster, and what it has to offer.

Nothing else in the package imports Ray but this package, which a run loads for `--ray`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import scalerl_jax
from scalerl_jax.cluster import slice_hosts
from scalerl_jax.cluster.placement import HostNode, Seats, hosts_of
from scalerl_jax.machines import ray_access
from scalerl_jax.process.ending import first_line

try:
    import ray
    from ray.exceptions import GetTimeoutError

    from scalerl_jax.cluster.calls import calling
except ImportError as error:
    raise ValueError(
        "--ray needs the package ray, which is not installed here: "
        'pip install -e ".[ray]"'
    ) from error

_CONNECT_TIMEOUT_S = 10.0
_SEEN_FILE = "config.json"  # of a run, written before any process starts
_LOOPBACK = "127.0.0.1"
_LOCAL_CPUS = 64  # of a cluster that is this machine alone: places, not cores
Kind = Literal["cpu", "gpu", "tpu"]
Role = Literal["learner", "replica"]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster that this process is connected to."""

    address: str
    kind: Kind  # of the devices that it has
    seats: Seats | None = None  # on TPUs, once they are given out

    def options(
        self, devices: int, *, role: Role, number: int, rank: int = 0
    ) -> dict[str, Any]:
        """Return the Ray options of a role's actor: devices, host, environment.

        Args:
            number: the rank in the learner, or which replica.
            rank: of the replica's processes.
        """
        if self.kind == "tpu":
            assert self.seats is not None, "TPUs are given out by `fit_cluster`"
            # A host that was away may have another address.
            seats = self.seats.refreshed(self.hosts())
            ranked = role == "learner"
            seat = seats.ranks()[number] if ranked else seats.replica(number)[rank]
            return seat.options()
        if self.kind == "cpu":
            flags = f"--xla_force_host_platform_device_count={devices}"
            variables = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
            return {"num_cpus": 1, "runtime_env": {"env_vars": variables}}
        variables = {"JAX_PLATFORMS": "cuda,cpu"}  # params are loaded by way of the CPU
        return {
            "num_cpus": 1,
            "num_gpus": devices,
            "runtime_env": {"env_vars": variables},
        }

    def hosts(self) -> list[HostNode]:
        """Return the hosts with TPU chips that are there now."""
        return hosts_of(ray.nodes())

    def devices(self) -> int | None:
        """Return the number of devices of the machines; None: as many as asked for."""
        if self.kind == "cpu":
            return None
        return int(ray.cluster_resources()[self.kind.upper()])


@contextlib.contextmanager
def connected(
    address: str,
    *,
    timeout_s: float,
    environment: Mapping[str, str] = os.environ,
    port: int = slice_hosts.PORT,
) -> Iterator[Cluster | None]:
    """Join a cluster while the block runs.

    Args:
        address: as `connect` takes it, or "slice" on every host of a TPU slice: worker
            0 makes the cluster, and the others yield None when it has ended.
        timeout_s: for the hosts of a slice to come.
        port: of the head of a slice.
    """
    with contextlib.ExitStack() as opened:
        host = None
        if address == "slice":
            host = opened.enter_context(
                slice_hosts.slice_cluster(environment, timeout_s=timeout_s, port=port)
            )
            if host is None:
                yield None
                return
        opened.callback(disconnect)
        cluster = connect(host.head if host else address)
        if host:
            slice_hosts.await_hosts(host, cluster.hosts, timeout_s=timeout_s)
        yield cluster


def connect(address: str) -> Cluster:
    """Join the cluster at HOST:PORT, the one of this machine ("auto"), or start one.

    "local" starts one that is this machine alone and ends with this process; where it
    listens, and who may join, is set by `ray_access.prepared` before Ray is imported.

    Raises:
        ValueError: there is none, or it is of another version.
        RuntimeError: the one of this machine does not start, or could be reached from
            others.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address == "local":
        options |= {"num_cpus": _LOCAL_CPUS, "include_dashboard": False}
        # Ray's own choice of 15 starves roles that share cores with other programs.
        os.environ.setdefault("RAY_worker_niceness", "0")
    elif address != "auto":
        _check_answers(address)
    try:
        ray.init(address=address, **options)
    except Exception as error:  # of any kind: Ray raises Exception itself, too
        if address == "local":
            raise RuntimeError(
                f"--ray=local: Ray {metadata.version('ray')} does not start on this "
                f"machine: {first_line(error)}; it needs memory, room in RAY_TMPDIR, "
                f"and cores that are free for half a minute"
            ) from error
        if _asks_for_token(error):
            raise ValueError(
                f"--ray={address} asks for another token than this process has, or "
                f"was told by --ray_without_token not to show: bring the file of the "
                f"head's machine here, with chmod 600, and name it in "
                f"RAY_AUTH_TOKEN_PATH"
            ) from error
        raise ValueError(
            f"--ray={address}: no cluster of Ray {metadata.version('ray')} can be "
            f"joined: {first_line(error)}; start one with `ray start --head`, or take "
            f"--ray=local"
        ) from error
    if address == "local" and (own := ray.util.get_node_ip_address()) != _LOOPBACK:
        disconnect()
        raise RuntimeError(
            f"--ray=local: Ray {metadata.version('ray')} listens at {own}, where other "
            f"machines may reach it, and not at {_LOOPBACK}; install the version of "
            f"constraints.txt"
        )
    resources = ray.cluster_resources()
    kind: Kind = "tpu" if "TPU" in resources else "gpu" if "GPU" in resources else "cpu"
    return Cluster(address, kind)


def disconnect() -> None:
    """Leave the cluster; one that was started here ends."""
    ray.shutdown()


def _asks_for_token(error: BaseException | None) -> bool:
    """Return whether a cluster refused this process for its lack of a token."""
    while error is not None:
        if "InvalidAuthToken" in str(error):  # in the text of what was tried last
            return True
        error = error.__cause__ or error.__context__
    return False


def _check_answers(address: str) -> None:
    """Refuse an address that does not answer, before Ray tries it for minutes."""
    try:
        where = ray_access.parse_address(address)
        socket.create_connection(where, _CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--ray={address} does not answer within {_CONNECT_TIMEOUT_S:g} s "
            f"({error}); see `ray status` there, and its firewall"
        ) from error


def check_process(
    actor: Any, name: str, directory: str, *, limit_s: float, setting: str
) -> None:
    """Refuse a process of other versions, or one that has another file system.

    Raises:
        ValueError: names the process and what is wrong.
        RoleLost: it is gone.
        TimeoutError: it found no place; `setting` says how many are asked for.
    """
    with calling(name):
        try:
            theirs: Any = ray.get(actor.versions.remote(), timeout=limit_s)
        except GetTimeoutError as error:
            raise TimeoutError(
                f"{name} found no place in the cluster within "
                f"generators.start_timeout_s = {limit_s:g}: add machines, or lower "
                f"{setting}"
            ) from error
    check_versions(theirs, where=name)
    try:
        with calling(name):
            seen = ray.get(actor.sees.remote(_SEEN_FILE), timeout=limit_s)
    except TimeoutError as error:  # of the bucket
        raise TimeoutError(f"{name}: {first_line(error)}") from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{name}: {first_line(error)}") from error
    if not seen:
        raise ValueError(
            f"{name} does not see {directory}/{_SEEN_FILE}: --workdir = {directory} "
            f"must be a directory that all machines share, or gs://BUCKET/PATH"
        )


def versions() -> dict[str, str]:
    """Return the versions and the code digest that all processes of a run must share.

    Settings are not among them: every process gets those of the controller.  Nor is
    libtpu, which the controller's machine need not have.
    """
    import jax

    return {
        "scalerl_jax": scalerl_jax.__version__,
        "code": _code_digest(Path(scalerl_jax.__file__).parent),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "ray": ray.__version__,
        "Python": ".".join(map(str, sys.version_info[:2])),
    }


@functools.cache  # the code that runs is that of the start
def _code_digest(package: Path) -> str:
    """Return a digest of a package's Python files, as `git diff` would tell them."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        name = file.relative_to(package).as_posix()
        digest.update(f"{name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def check_versions(theirs: dict[str, str], *, where: str) -> None:
    """Refuse a process with other versions than this one.

    Raises:
        ValueError: names the process, and both versions.
    """
    for name, own in versions().items():
        if theirs.get(name) != own:
            raise ValueError(
                f"{where} has {name} {theirs.get(name)} and the controller has {own}; "
                f"install one version on all machines"
            )
