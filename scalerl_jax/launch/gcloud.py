"""The gcloud command lines that this package uses (version 528); nothing runs here.

Queued resources and TPU VMs use the generally available commands, not alpha ones.
"""

from scalerl_jax.launch.job import Job, runtime_of
from scalerl_jax.launch.place import State
from scalerl_jax.machines.slices import parse_type

# docs.cloud.google.com/tpu/docs/queued-resources; ACCEPTED is the older name of
# WAITING_FOR_RESOURCES.  A SUSPENDED spot slice never comes back.
QUEUED: dict[str, State] = {
    "ACCEPTED": "coming",
    "WAITING_FOR_RESOURCES": "coming",
    "CREATING": "coming",
    "PROVISIONING": "coming",
    "ACTIVE": "up",
    "SUSPENDING": "going",
    "SUSPENDED": "broken",
    "FAILED": "broken",
    "DELETING": "going",
}
NODE: dict[str, State] = {  # of a TPU VM: tpu.googleapis.com's Node.State
    "CREATING": "coming",
    "STARTING": "coming",
    "RESTARTING": "coming",
    "REPAIRING": "coming",
    "READY": "up",
    "STOPPING": "going",
    "DELETING": "going",
    "STOPPED": "broken",
    "PREEMPTED": "broken",
    "TERMINATED": "broken",
}
LABEL = "scalerl-jax-run"


def _scope(job: Job) -> list[str]:
    return [f"--project={job.project}", f"--zone={job.zone}"]


def _tpu(*words: str) -> list[str]:
    return ["gcloud", "compute", "tpus", *words]


def _kind(job: Job) -> list[str]:
    """Return the flags of the slice's kind; a type means its most compact shape."""
    slice = job.slice
    if parse_type(slice.type)[1] == slice.topology:
        return [f"--accelerator-type={slice.type}"]
    topology = slice.kind.written(slice.topology)
    return [f"--type={slice.kind.types[0]}", f"--topology={topology}"]


def _node(job: Job) -> list[str]:
    """Return the flags that TPU VMs and queued resources share."""
    return [
        *(["--spot"] if job.spot else []),
        *(["--reserved"] if job.reserved else []),
        *(["--internal-ips"] if job.internal_ips else []),
        *_account(job, subnetwork="--subnetwork"),
        f"--labels={LABEL}={job.name}",
    ]


def _account(job: Job, *, subnetwork: str) -> list[str]:
    """Return the flags of account and network; `subnetwork` names the last flag."""
    given = {
        "--service-account": job.service_account,
        "--network": job.network,
        subnetwork: job.subnetwork,
    }
    return [f"{name}={value}" for name, value in given.items() if value]


def create(job: Job, name: str) -> list[str]:
    """Return the command that creates a TPU VM, or requests a slice."""
    if job.place == "tpu_vm":
        version = [f"--version={runtime_of(job)}"]
        verb = _tpu("tpu-vm", "create", name)
    else:
        version = [f"--runtime-version={runtime_of(job)}", f"--node-id={name}"]
        verb = _tpu("queued-resources", "create", name)
    return [*verb, *_scope(job), *_kind(job), *version, *_node(job), "--quiet"]


def describe(job: Job, name: str) -> list[str]:
    """Return the command that describes a TPU VM or queued resource."""
    what = "tpu-vm" if job.place == "tpu_vm" else "queued-resources"
    return [*_tpu(what, "describe", name), *_scope(job)]


def delete(job: Job, name: str) -> list[str]:
    """Return the command that deletes a TPU VM, or a queued resource with its VMs."""
    what = "tpu-vm" if job.place == "tpu_vm" else "queued-resources"
    force = [] if job.place == "tpu_vm" else ["--force"]
    return [*_tpu(what, "delete", name), *_scope(job), *force, "--quiet"]


def ssh(job: Job, name: str, script: str) -> list[str]:
    """Return the command that runs a script on every host of a slice."""
    internal = ["--internal-ip"] if job.internal_ips else []
    command = [*_tpu("tpu-vm", "ssh", name), *_scope(job), "--worker=all", *internal]
    return [*command, f"--command={script}", "--quiet"]


def types(job: Job) -> list[str]:
    """Return the command that lists the accelerator types of a zone."""
    return [*_tpu("accelerator-types", "list"), *_scope(job)]


def bucket(job: Job) -> list[str]:
    """Return the command that describes the bucket."""
    name = job.bucket.removeprefix("gs://").partition("/")[0]
    describe = ["gcloud", "storage", "buckets", "describe", f"gs://{name}"]
    return [*describe, f"--project={job.project}"]


def storage(verb: str, *words: str) -> list[str]:
    """Return a `gcloud storage` command."""
    return ["gcloud", "storage", verb, *words]


def head_create(job: Job, name: str) -> list[str]:
    """Return the command that creates the head's machine: on demand, without TPUs."""
    return [
        *("gcloud", "compute", "instances", "create", name, *_scope(job)),
        f"--machine-type={job.head_machine}",
        *("--image-family=ubuntu-2204-lts", "--image-project=ubuntu-os-cloud"),
        *("--boot-disk-size=200GB", "--scopes=cloud-platform"),
        *_account(job, subnetwork="--subnet"),
        *(["--no-address"] if job.internal_ips else []),
        *(f"--labels={LABEL}={job.name}", "--quiet"),
    ]


def head(job: Job, verb: str, name: str) -> list[str]:
    """Return the command that describes or deletes the head's machine."""
    command = ["gcloud", "compute", "instances", verb, name, *_scope(job)]
    return [*command, *(["--quiet"] if verb == "delete" else [])]


def head_ssh(job: Job, name: str, script: str) -> list[str]:
    """Return the command that runs a script on the head's machine."""
    internal = ["--internal-ip"] if job.internal_ips else []
    command = ["gcloud", "compute", "ssh", name, *_scope(job), *internal]
    return [*command, f"--command={script}", "--quiet"]
