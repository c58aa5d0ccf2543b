"""Start several processes that train as one.

They report to process 0 before JAX starts (`meeting`), since
`jax.distributed.initialize` ends a process from C++ if another is missing, without
saying which.  JAX's coordinator has no authentication; `coordinator` restricts where it
listens.
"""

import math
import time
from typing import Any

import jax
from jax._src import clusters

from scalerl_jax.parallel.coordinator import HeldPort, ProcessPlace, opened_coordinator
from scalerl_jax.parallel.meeting import GRACE_S, meet
from scalerl_jax.parallel.multihost import agree

# Seconds until a dead process is detected; the others then end with status 134.
HEARTBEAT_S = 60
# Seconds that a process which ended with an error waits for the others; then it ends
# them.
SHUTDOWN_S = 60


def find_place(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_s: float = 300.0,
) -> ProcessPlace:
    """Return this process's number and coordinator.

    Without arguments they are detected (TPU VMs, Kubernetes, Slurm, Open MPI).

    Args:
        coordinator: HOST:PORT of process 0; the port must be free.
        num_processes: number of processes.
        process_id: number of this process, from 0.
        timeout_s: for the detection.

    Raises:
        ValueError: an argument is wrong or missing.
    """
    given = (coordinator, num_processes, process_id)
    local_devices = None
    if given == (None, None, None):
        detect: Any = clusters.ClusterEnv.auto_detect_unset_distributed_params
        found = detect(None, None, None, None, None, int(timeout_s))
        coordinator, num_processes, process_id, local_devices = found
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError(
            "--distributed needs --coordinator=HOST:PORT, --num_processes and "
            "--process_id, all three; they are detected only on TPU VMs, Kubernetes, "
            "Slurm and Open MPI"
        )
    place = ProcessPlace(
        coordinator=coordinator,
        num_processes=num_processes,
        process_id=process_id,
        local_devices=local_devices,
    )
    place.check()
    return place


def initialize(
    place: ProcessPlace,
    *,
    secret: str = "",
    held: HeldPort | None = None,
    timeout_s: float = 300.0,
    heartbeat_s: int = HEARTBEAT_S,
) -> int:
    """Join the other processes; call it before anything asks JAX for devices.

    Args:
        place: this process.
        secret: the secret of `signed_lines.new_secret` that all processes share; unused
            for a single one.
        held: the coordinator's port, if process 0 holds it already; closed here.
        timeout_s: for all to report.  The whole start takes at most 30 s more.
        heartbeat_s: seconds without a heartbeat after which a process counts as dead.

    Returns:
        The number of connections from outside this start.

    Raises:
        ValueError: the arguments of two processes contradict each other.
        RuntimeError: the coordinator's port is taken.
        TimeoutError: a process did not report; the message says which.
    """
    end = time.monotonic() + timeout_s
    place.check()
    with opened_coordinator(place, held) as at:
        met = meet(place, secret=secret, at=at, timeout_s=timeout_s, end=end)
        jax.distributed.initialize(
            met.coordinator,
            place.num_processes,
            place.process_id,
            local_device_ids=place.local_devices,
            initialization_timeout=math.ceil(_left_s(end)),
            heartbeat_timeout_seconds=heartbeat_s,
            shutdown_timeout_seconds=SHUTDOWN_S,
            coordinator_bind_address=at.bind_address if at else None,
        )
        agree(jax.__version__, name="the version of JAX", timeout_s=_left_s(end))
    return met.strangers


def _left_s(end: float) -> float:
    """Return the seconds left for a start, at least 1.0: JAX's minimum."""
    return max(end + GRACE_S - time.monotonic(), 1.0)
