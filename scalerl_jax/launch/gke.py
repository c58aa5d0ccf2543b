"""A slice of a GKE cluster that xpk has made: a JobSet in Kueue's queue.

The workload is machines and run in one: it starts the run's supervisor in a pod for
each host, and starts the pods again when a node is taken away.
"""

from collections.abc import Sequence
from typing import Any

from scalerl_jax.launch import hosts, kubernetes
from scalerl_jax.launch.bucket import Bucket
from scalerl_jax.launch.client import Client
from scalerl_jax.launch.job import Job, region_of
from scalerl_jax.launch.keep import Refused
from scalerl_jax.launch.outcome import FINAL, Outcome
from scalerl_jax.launch.place import Machines, State

# What the machine types of node pools begin with, as xpk 1.16 has them.
_MACHINES = {"v4": "ct4p-", "v5e": "ct5lp-", "v5p": "ct5p-", "v6e": "ct6e-"}
_STORAGE = "storages.xpk.x-k8s.io"


class GkePlace:
    """The workload of a job, by the job's name."""

    def __init__(self, job: Job, more: Sequence[str], client: Client) -> None:
        """Ask for nothing yet.

        Args:
            job: what runs.
            more: further flags of the run.
            client: runs gcloud, kubectl and xpk.
        """
        self._job, self._more, self._client = job, tuple(more), client
        self._bucket = Bucket(job, client)
        self._context = ""

    # -- before anything is made ------------------------------------------------------

    def check(self) -> None:
        """Refuse a cluster, a topology, a storage or a bucket that is not there."""
        hosts.check_config(self._job)
        self._check_topology(self._cluster())
        self._bucket.check()
        self._check_storage()

    def _cluster(self) -> dict[str, Any]:
        """Return what GKE says of the cluster.

        Raises:
            ValueError: there is none.
        """
        job = self._job
        near = (job.zone, region_of(job.zone))
        found = self._client.ask(kubernetes.cluster(job)) or []
        if self._client.dry_run:
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
        """Refuse a slice that no node pool has."""
        job, slice = self._job, self._job.slice
        if self._client.dry_run:
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
        """Refuse a storage that is not the bucket, or lies elsewhere in the pods."""
        job = self._job
        found = self._get(_STORAGE, job.storage)
        if self._client.dry_run:
            return
        way = (
            f"xpk storage attach {job.storage} --type=gcsfuse --bucket="
            f"{job.bucket.removeprefix('gs://')} --mount-point={job.mount}"
        )
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
        held = volume.get("spec", {}).get("csi", {}).get("volumeHandle", "")
        if held != job.bucket.removeprefix("gs://"):
            raise ValueError(
                f"--storage={job.storage} is the bucket {held}, and --bucket="
                f"{job.bucket} another"
            )

    def _get(self, kind: str, name: str) -> Any:
        return self._client.ask(kubernetes.get(self._login(), kind, name))

    def _login(self) -> str:
        """Return the cluster's context, which kubectl knows after the first call."""
        if not self._context:
            job, location = self._job, self._cluster()["location"]
            self._client.run(kubernetes.login(job, location))
            self._context = f"gke_{job.project}_{location}_{job.cluster}"
        return self._context

    # -- the workload -----------------------------------------------------------------

    def machines(self) -> Machines:
        """Return what Kubernetes says of the JobSet."""
        found = self._get("jobset", self._job.name)
        if found is None:
            return Machines(state="absent", said="ABSENT")
        state, said = _read_state(found)
        return Machines(
            state=state,
            said=said,
            created=str(found["metadata"].get("creationTimestamp", "")),
            wrong=self._wrong(found),
        )

    def _wrong(self, found: dict[str, Any]) -> str:
        """Return why a JobSet of our name is not ours; empty if it is."""
        (job, *_) = found["spec"]["replicatedJobs"]
        pod = job["template"]["spec"]["template"]["spec"]
        told = str(pod["containers"][0].get("command", ""))
        shape = pod.get("nodeSelector", {}).get("cloud.google.com/gke-tpu-topology")
        slice, name = self._job.slice, self._job.name
        if f"--workdir={self._job.workdir} " not in told:
            return f"the name {name} is taken by a workload of another run"
        if shape not in (None, slice.kind.written(slice.topology)):
            return (
                f"the name {name} is taken by a slice {shape}, and --topology="
                f"{self._job.topology}; take another --name, or `launch stop` first"
            )
        return ""

    def create(self) -> None:
        """Ask for the workload."""
        self._client.run(kubernetes.create(self._job, self._more))

    def replace(self) -> list[str]:
        """Remove what has failed, unless that was the end of the run."""
        outcome = self.outcome()
        return [] if outcome and outcome.state in FINAL else self.remove()

    def remove(self) -> list[str]:
        """Remove the workload, and wait until its pods are gone."""
        try:
            self._client.run(kubernetes.delete(self._job, self._login()))
        except (Refused, RuntimeError, ValueError) as error:
            return [f"{self._job.name} in {self._job.cluster}: {error}"]
        return []

    # -- the run ----------------------------------------------------------------------

    def start(self) -> str:
        """Do nothing: the workload has started the run.

        Raises:
            RuntimeError: its pods have ended, and the run is not over.
        """
        if self._client.dry_run or self.machines().said != "COMPLETED":
            return "it runs already: it came with the workload"
        outcome = self.outcome()
        if outcome is None or outcome.state not in FINAL:
            raise RuntimeError(
                f"the pods of {self._job.name} have ended, and "
                f"{self._job.outcome_file} does not say that the run is over; "
                f"`launch logs` has their last lines, `launch stop` removes them"
            )
        return f"it is {outcome.state} already"

    def end(self) -> None:
        """Do nothing: `remove` gives the run the time to save itself."""

    def outcome(self) -> Outcome | None:
        """Return how the run stands, from the bucket."""
        return self._bucket.outcome()

    def last_step(self) -> str:
        """Return when the run last wrote a step, as the bucket says."""
        return self._bucket.last_step()

    def logs(self, lines: int) -> str:
        """Return the last lines of every pod."""
        return self._client.run(kubernetes.logs(self._job, self._login(), lines))

    def fetch(self, target: str) -> None:
        """Bring the run's files here, all but checkpoints."""
        self._bucket.fetch(target)


def _read_state(found: dict[str, Any]) -> tuple[State, str]:
    """Return what the status of a JobSet means, and a word for it.

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
