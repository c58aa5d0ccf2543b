"""The command lines of xpk 1.16 and kubectl 1.32; nothing runs here.

xpk makes a JobSet of the run's name, which kubectl looks at and removes.  Every call of
kubectl names its context, so that no other cluster is touched.
"""

import shlex
from collections.abc import Sequence

from scalerl_jax.launch.job import Job
from scalerl_jax.utils.preemption import PREEMPTED

GRACE_S = 60  # between a pod's SIGTERM and its end
_RESTARTS = 50  # of the JobSet: nodes that were taken away
_WAIT_S = 300  # for the pods to be gone


def cluster(job: Job) -> list[str]:
    """Return the command that lists the project's clusters of this name."""
    found = ["gcloud", "container", "clusters", "list", f"--project={job.project}"]
    return [*found, f"--filter=name={job.cluster}"]


def login(job: Job, location: str) -> list[str]:
    """Return the command that gives kubectl the cluster's context."""
    verb = ["gcloud", "container", "clusters", "get-credentials", job.cluster]
    return [*verb, f"--project={job.project}", f"--location={location}"]


def create(job: Job, more: Sequence[str]) -> list[str]:
    """Return the command that makes the workload, and with it starts the run."""
    slice = job.slice
    supervised = [
        *("python", "-m", "scalerl_jax.launch", "supervise"),
        *(f"--workdir={job.workdir}", f"--failures={job.failures}"),
        *("--", *job.command(more)),
    ]
    topology = slice.kind.written(slice.topology)
    return [
        *("xpk", "workload", "create", f"--workload={job.name}"),
        *(f"--project={job.project}", f"--zone={job.zone}", f"--cluster={job.cluster}"),
        f"--tpu-type={slice.kind.types[0]}-{topology}",
        *("--num-slices=1", f"--docker-image={job.image}", f"--storage={job.storage}"),
        *(f"--max-restarts={_RESTARTS}", f"--restart-on-exit-codes={PREEMPTED}"),
        f"--termination-grace-period-seconds={GRACE_S}",
        f"--command={shlex.join(supervised)}",
    ]


def _kubectl(context: str, *words: str) -> list[str]:
    return ["kubectl", *words, f"--context={context}", "--namespace=default"]


def get(context: str, kind: str, name: str) -> list[str]:
    """Return the command that shows one object; nothing if there is none."""
    return [*_kubectl(context, "get", kind, name), "--ignore-not-found"]


def delete(job: Job, context: str) -> list[str]:
    """Return the command that removes the workload, and waits until its pods are gone.

    Each pod has its grace, in which the run saves itself.
    """
    command = _kubectl(context, "delete", "jobset", job.name, "--ignore-not-found")
    return [*command, "--cascade=foreground", f"--timeout={_WAIT_S}s"]


def logs(job: Job, context: str, lines: int) -> list[str]:
    """Return the command that shows the last lines of every pod, with its name."""
    command = _kubectl(
        context, "logs", f"--selector=xpk.google.com/workload={job.name}"
    )
    most = max(1, job.slice.num_chips // 4)  # pods: one has four chips, or the only one
    return [*command, f"--tail={lines}", "--prefix", f"--max-log-requests={most}"]
