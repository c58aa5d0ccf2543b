"""Slices of a GKE cluster that xpk has created: a JobSet in Kueue's queue.

Creating the workload also starts the run: each host gets a pod with the run's
supervisor, and the pods are restarted when a node is preempted.  xpk 1.16 creates a
JobSet of the run's name; kubectl 1.32 reads and deletes it.  Every call of kubectl
names its context, so that no other cluster is touched.
"""

import shlex
from collections.abc import Sequence
from typing import Any

from scalerl_jax.launch import hosts, ray_token
from scalerl_jax.launch.cloud import CloudPlace
from scalerl_jax.launch.job import Job, region_of
from scalerl_jax.launch.outcome import FINAL
from scalerl_jax.launch.place import Machines, Refused, State, say
from scalerl_jax.process.preemption import PREEMPTED

# Generation -> prefix of the machine types of its node pools, as in xpk 1.16.
_MACHINES = {"v4": "ct4p-", "v5e": "ct5lp-", "v5p": "ct5p-", "v6e": "ct6e-"}
_STORAGE = "storages.xpk.x-k8s.io"
GRACE_S = 60  # seconds between a pod's SIGTERM and SIGKILL
_RESTARTS = 50  # of the JobSet, one for each preempted node
_WAIT_S = 300  # seconds to wait until the pods are gone


class GkePlace(CloudPlace):
    """The workload of a job; it has the job's name."""

    _context = ""  # kubectl's context of the cluster; empty before the login

    # -- before anything is created ---------------------------------------------------

    def check(self) -> None:
        """Raise ValueError if cluster, topology, storage or bucket is missing."""
        hosts.check_config(self.job)
        self._check_topology(self._cluster())
        self.check_bucket()
        self._check_storage()

    def _cluster(self) -> dict[str, Any]:
        """Return GKE's description of the cluster.

        Raises:
            ValueError: the zone and its region have no such cluster.
        """
        job = self.job
        near = (job.zone, region_of(job.zone))
        found = self.client.ask(list_clusters(job)) or []
        if self.client.dry_run:
            return {"name": job.cluster, "location": near[1]}
        for each in found:
            if each.get("name") == job.cluster and each.get("location") in near:
                return each
        others = ", ".join(str(each.get("location")) for each in found)
        raise ValueError(
            f"--cluster={job.cluster}: {job.project} has no such cluster in {near[1]}"
            + (f", but in {others}" if others else "; xpk cluster create makes one")
        )

    def _check_topology(self, cluster: dict[str, Any]) -> None:
        """Raise ValueError if no node pool has the slice's machines and topology."""
        job, slice = self.job, self.job.slice
        if self.client.dry_run:
            return
        has = [
            (pool["config"]["machineType"], pool.get("placementPolicy", {}))
            for pool in cluster.get("nodePools", [])
            if str(pool.get("config", {}).get("machineType", "")).startswith("ct")
        ]
        shape = slice.kind.written(slice.topology)
        kind = _MACHINES[slice.generation]
        for machine, placement in has:
            if (
                machine.startswith(kind)
                and placement.get("tpuTopology", shape) == shape
            ):
                return
        if cluster.get("autoscaling", {}).get("enableNodeAutoprovisioning"):
            return
        listed = [f"{machine} {each.get('tpuTopology', '')}" for machine, each in has]
        raise ValueError(
            f"--topology={job.topology}: the node pools of {job.cluster} have "
            f"{', '.join(map(str.strip, listed)) or 'no TPUs'}; xpk cluster create "
            f"with the type of this slice adds one"
        )

    def _check_storage(self) -> None:
        """Raise ValueError if the storage is not the bucket, mounted at `mount`."""
        job = self.job
        found = self._get(_STORAGE, job.storage)
        if self.client.dry_run:
            return
        way = shlex.join(attach(job))
        if found is None:
            raise ValueError(
                f"--storage={job.storage}: {job.cluster} has no such storage; {way} "
                f"makes it"
            )
        spec = found["spec"]
        if spec["mount_point"] != job.mount or spec["readonly"]:
            only = ", read-only" if spec["readonly"] else ""
            raise ValueError(
                f"--storage={job.storage} is at {spec['mount_point']}{only}, and the "
                f"run writes to --mount={job.mount}; {way} makes one"
            )
        volume = self._get("persistentvolume", spec["pv"]) or {}
        spec = volume.get("spec", {})
        held = spec.get("csi", {}).get("volumeHandle", "")
        if held != job.bucket.removeprefix("gs://"):
            raise ValueError(
                f"--storage={job.storage} is the bucket {held}, and --bucket="
                f"{job.bucket} another"
            )
        if not any("rename-dir-limit" in each for each in spec.get("mountOptions", [])):
            say(
                f"warning: --storage={job.storage} has no mount option rename-dir-limit"
                f", without which gcsfuse renames no directory, and no checkpoint is "
                f"completed, unless the bucket has a hierarchical namespace; xpk "
                f"storage detach, and {way}"
            )

    def _get(self, kind: str, name: str) -> Any:
        return self.client.ask(get(self._login(), kind, name))

    def _login(self) -> str:
        """Return the cluster's context; the first call adds it to kubectl's config."""
        if not self._context:
            job, location = self.job, self._cluster()["location"]
            self.client.run(login(job, location))
            self._context = f"gke_{job.project}_{location}_{job.cluster}"
        return self._context

    # -- the workload -----------------------------------------------------------------

    def machines(self) -> Machines:
        """Return the state of the JobSet, as Kubernetes reports it."""
        found = self._get("jobset", self.job.name)
        if found is None:
            return Machines(state="absent", said="ABSENT")
        state, said = _read_state(found)
        if said == "COMPLETED" and self._before and self.outcome() is None:
            state = "broken"  # its command is not this one, and it starts no other
        return Machines(
            state=state,
            said=said,
            created=str(found["metadata"].get("creationTimestamp", "")),
            wrong=self._wrong(found),
        )

    def _wrong(self, found: dict[str, Any]) -> str:
        """Return why the JobSet of this name is another job's; "": it is this job's."""
        (job, *_) = found["spec"]["replicatedJobs"]
        pod = job["template"]["spec"]["template"]["spec"]
        told = str(pod["containers"][0].get("command", ""))
        shape = pod.get("nodeSelector", {}).get("cloud.google.com/gke-tpu-topology")
        slice, name = self.job.slice, self.job.name
        if f"--workdir={self.job.workdir} " not in told:
            return f"the name {name} is taken by a workload of another run"
        if shape not in (None, slice.kind.written(slice.topology)):
            return (
                f"the name {name} is taken by a slice {shape}, and --topology="
                f"{self.job.topology}; take another --name, or `launch stop "
                f"--topology={slice.generation}:{shape}` first"
            )
        return ""

    def create(self) -> None:
        """Create the workload, which starts the run."""
        if self.job.ray:
            ray_token.upload(self.job.ray_token, self.client)
        self.client.run(create(self.job, self.more))

    def replace(self) -> list[str]:
        """Remove a failed workload, unless the run is over."""
        outcome = self.outcome()
        return [] if outcome and outcome.state in FINAL else self.remove()

    def remove(self) -> list[str]:
        """Remove the workload, and wait until its pods are gone."""
        try:
            self.client.run(delete(self.job, self._login()))
        except (Refused, RuntimeError, ValueError) as error:
            return [f"{self.job.name} in {self.job.cluster}: {error}"]
        return []

    # -- the run ----------------------------------------------------------------------

    def start(self) -> str:
        """Do nothing: the workload has started the run.

        Raises:
            RuntimeError: the pods have ended, and the run is not over.
        """
        if self.client.dry_run:
            return "it runs already: the workload started it"
        there = self.machines()
        if there.state != "up" or there.said != "COMPLETED":
            return "it runs already: the workload started it"
        outcome = self.outcome()
        if outcome is None or outcome.state not in FINAL:
            raise RuntimeError(
                f"the pods of {self.job.name} have ended, and "
                f"{self.job.outcome_file} does not say that the run is over; "
                f"`launch logs` has their last lines, `launch stop` removes them"
            )
        return f"it is {outcome.state} already"

    def end(self) -> None:
        """Do nothing: `remove` leaves the run time to save itself."""

    def logs(self, lines: int) -> str:
        """Return the last lines of every pod."""
        return self.client.run(logs(self.job, self._login(), lines))


def _read_state(found: dict[str, Any]) -> tuple[State, str]:
    """Return the state that a JobSet's status means, and one word for people.

    github.com/kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go
    """
    if found["metadata"].get("deletionTimestamp"):
        return "going", "DELETING"
    status = found.get("status", {})
    true = {
        each["type"]
        for each in status.get("conditions", [])
        if each.get("status") == "True"
    }
    if "Completed" in true:
        return "up", "COMPLETED"
    if "Failed" in true:
        return "broken", "FAILED"
    if found["spec"].get("suspend"):
        return "coming", "QUEUED"
    jobs = status.get("replicatedJobsStatus", [])
    if sum(each.get("ready", 0) for each in jobs):
        return "up", "RUNNING"
    return "coming", "STARTING"


# -- the command lines; nothing runs here ----------------------------------------------


def list_clusters(job: Job) -> list[str]:
    """Return the command that lists the project's clusters of this name."""
    found = ["gcloud", "container", "clusters", "list", f"--project={job.project}"]
    return [*found, f"--filter=name={job.cluster}"]


def attach(job: Job) -> list[str]:
    """Return the command that makes the bucket a storage of the cluster."""
    bucket = job.bucket.removeprefix("gs://")
    return [
        *("xpk", "storage", "attach", job.storage, "--type=gcsfuse"),
        *(f"--project={job.project}", f"--zone={job.zone}", f"--cluster={job.cluster}"),
        *(f"--bucket={bucket}", "--size=1000", f"--mount-point={job.mount}"),
        *("--auto-mount=false", "--readonly=false"),
        f"--mount-options={','.join(hosts.MOUNT_OPTIONS)}",
    ]


def login(job: Job, location: str) -> list[str]:
    """Return the command that adds the cluster's context to kubectl's config."""
    verb = ["gcloud", "container", "clusters", "get-credentials", job.cluster]
    return [*verb, f"--project={job.project}", f"--location={location}"]


def create(job: Job, more: Sequence[str]) -> list[str]:
    """Return the command that creates the workload, which starts the run."""
    slice = job.slice
    topology = slice.kind.written(slice.topology)
    return [
        *("xpk", "workload", "create", f"--workload={job.name}"),
        *(f"--project={job.project}", f"--zone={job.zone}", f"--cluster={job.cluster}"),
        f"--tpu-type={slice.kind.types[0]}-{topology}",
        *(f"--num-slices={job.slices[0]}", f"--docker-image={job.image}"),
        f"--storage={job.storage}",
        *(f"--max-restarts={_RESTARTS}", f"--restart-on-exit-codes={PREEMPTED}"),
        f"--termination-grace-period-seconds={GRACE_S}",
        f"--command={shlex.join(job.supervised(job.command(more)))}",
    ]


def _kubectl(context: str, *words: str) -> list[str]:
    return ["kubectl", *words, f"--context={context}", "--namespace=default"]


def get(context: str, kind: str, name: str) -> list[str]:
    """Return the command that shows one object; it prints nothing for a missing one."""
    return [*_kubectl(context, "get", kind, name), "--ignore-not-found"]


def delete(job: Job, context: str) -> list[str]:
    """Return the command that removes the workload, and waits until its pods are gone.

    Each pod has `GRACE_S` seconds, in which the run saves itself.
    """
    command = _kubectl(context, "delete", "jobset", job.name, "--ignore-not-found")
    return [*command, "--cascade=foreground", f"--timeout={_WAIT_S}s"]


def logs(job: Job, context: str, lines: int) -> list[str]:
    """Return the command that shows the last lines of every pod, with its name."""
    command = _kubectl(
        context, "logs", f"--selector=xpk.google.com/workload={job.name}"
    )
    # Pods of all slices, of four chips at most.  With a lower limit kubectl fails.
    most = job.slices[0] * max(1, job.slice.num_chips // 4)
    return [*command, f"--tail={lines}", "--prefix", f"--max-log-requests={most}"]
