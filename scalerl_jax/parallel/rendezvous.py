"""The start of several processes that train as one.

They meet before JAX starts (`meeting`): `jax.distributed.initialize` ends a process
from C++ when another stays away, and does not say which.  JAX's own coordinator asks
nobody for a proof of who it is; `coordinator` says where it listens.
"""

import math
import time
from typing import Any

import jax
from jax._src import clusters

from scalerl_jax.parallel.coordinator import HeldPort, ProcessPlace, opened_coordinator
from scalerl_jax.parallel.meeting import GRACE_S, meet
from scalerl_jax.parallel.multihost import agree

# A process that died is noticed after so long; the others then end with status 134.
HEARTBEAT_S = 60
# One that ended with an error waits so long for the others, then ends them.
SHUTDOWN_S = 60


def find_place(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_s: float = 300.0,
) -> ProcessPlace:
    """Return this process's place.

    Without arguments it is found out (TPU VMs, Kubernetes, Slurm, Open MPI).

    Args:
        coordinator: HOST:PORT of process 0; the port must be free.
        num_processes: how many there are.
        process_id: which this is, from 0.
        timeout_s: for it to be found out.

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
            "--process_id, all three; they are found out on TPU VMs, Kubernetes, "
            "Slurm and Open MPI only"
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
    """Join the other processes; before anything else that asks JAX for devices.

    Args:
        place: of this process.
        secret: that all share, if there are several; `signed_lines.new_secret`.
        held: the coordinator's port, if process 0 has it already; closed here.
        timeout_s: for all of them to come.  The whole start takes at most 30 s more.
        heartbeat_s: a process that is silent for so long is dead.

    Returns:
        How many connections were not of this start.

    Raises:
        ValueError: the places of two processes contradict.
        RuntimeError: the coordinator's port is taken.
        TimeoutError: a process did not come; says which.
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
    """Return the time that is left of a start; JAX takes no less than a second."""
    return max(end + GRACE_S - time.monotonic(), 1.0)
