"""Slices in one Ray cluster, whose head is an on-demand machine without TPUs.

The head runs Ray's head, the controller and its supervisor; each host of a slice runs
a Ray node.  A lost slice is replaced alone, while the run continues.
"""

import datetime
from collections.abc import Sequence

from scalerl_jax.launch import gcloud, hosts, ray_token
from scalerl_jax.launch.client import Client
from scalerl_jax.launch.cloud import CloudPlace
from scalerl_jax.launch.job import Job
from scalerl_jax.launch.place import Machines, Refused, State
from scalerl_jax.launch.tpu import TpuPlace, end_run

PORT = 6379  # of Ray's head
# cloud.google.com/compute/docs/instances/instance-lifecycle
_INSTANCE: dict[str, State] = {
    "PROVISIONING": "coming",
    "STAGING": "coming",
    "PENDING": "coming",
    "REPAIRING": "coming",
    "RUNNING": "up",
    "STOPPING": "going",
    "SUSPENDING": "going",
    "STOPPED": "broken",
    "SUSPENDED": "broken",
    "TERMINATED": "broken",
}
_COUNT = """
from scalerl_jax.launch.ray_token import fetched
with fetched({token!r}):
    from scalerl_jax.cluster.session import connect
    print('chips', connect('127.0.0.1:{port}').devices() or 0)
"""


def _together(states: Sequence[State]) -> State:
    """Return the joint state of several machines: the most urgent state wins."""
    if "unknown" in states:
        return "unknown"
    if "broken" in states:
        return "broken"
    if "absent" in states:
        return "absent" if set(states) == {"absent"} else "partial"
    if "going" in states:
        return "going"
    return "coming" if "coming" in states else "up"


class RayPlace(CloudPlace):
    """The machines of a run over slices: NAME-head, NAME-0, NAME-1, ..."""

    def __init__(
        self, job: Job, more: Sequence[str], client: Client, *, poll_s: float = 15.0
    ) -> None:
        """Store the arguments, which are those of `TpuPlace`; run no command."""
        super().__init__(job, more, client)
        self._head = f"{job.name}-head"
        self._slices = [
            TpuPlace(job, more, client, poll_s=poll_s, name=f"{job.name}-{n}")
            for n in range(job.slices[0])
        ]

    def check(self) -> None:
        """Raise ValueError if zone, topology or bucket is missing; upload the code."""
        self._slices[0].check()

    def machines(self) -> Machines:
        """Return the joint state of head and slices, as the cloud reports it."""
        parts = self._parts()
        state = _together([each.state for each in parts.values()])
        dates = [each.created for each in parts.values() if each.created]
        return Machines(
            state=state,
            said=", ".join(f"{name} {each.said}" for name, each in parts.items()),
            # Compute Engine writes the hour of its own zone, the TPU API that of UTC.
            created=min(dates, key=datetime.datetime.fromisoformat, default=""),
            wrong="; ".join(each.wrong for each in parts.values() if each.wrong),
        )

    def create(self) -> None:
        """Request the missing machines, the head first."""
        parts = self._parts()
        if parts[self._head].state == "absent":
            self.client.run(gcloud.head_create(self.job, self._head))
        for each in self._slices:
            if parts[each.name].state == "absent":
                each.create()

    def replace(self) -> list[str]:
        """Remove the broken ones of head and slices."""
        return self._remove(
            [name for name, part in self._parts().items() if part.state == "broken"]
        )

    def remove(self) -> list[str]:
        """Remove all, the slices first: they cost most."""
        return self._remove([*(each.name for each in self._slices), self._head])

    def start(self) -> str:
        """Start Ray on machines without it, and the run once all chips have joined.

        Raises:
            Refused: fewer chips than the job's have joined Ray.
        """
        job, digest = self.job, self._slices[0].upload()
        ray_token.upload(job.ray_token, self.client)
        node = ["ray", "start", "--block", "--disable-usage-stats"]
        first = [*node, "--head", f"--port={PORT}", "--include-dashboard=false"]
        self._on_head(self._follower(first, digest, extras="gcs,ray"))
        joined = [*node, f"--address={self._address()}:{PORT}"]
        script = self._follower(joined, digest, extras="tpu,gcs,ray")
        for each in self._slices:
            each.on_hosts(script)
        count = _COUNT.format(token=job.ray_token, port=PORT)
        said = self._on_head(hosts.python_script(job, count))
        chips = int(said.split()[-1]) if said.split() else 0
        if chips < job.chips and not self.client.dry_run:
            raise Refused(f"{chips} of {job.chips} chips have joined Ray")
        command = job.command(self.more)
        said = self._on_head(hosts.start_script(job, digest, command, extras="gcs,ray"))
        started = said.rstrip().endswith("starts")
        return "the run starts on the head" if started else "it runs already"

    def end(self) -> None:
        """Ask the run to save itself."""
        end_run(self.job, self._on_head)

    def logs(self, lines: int) -> str:
        """Return the last lines of the head and of every host."""
        own = self._on_head(hosts.log_script(self.job, lines))
        return own + "".join(each.logs(lines) for each in self._slices)

    def _follower(self, command: list[str], digest: str, *, extras: str) -> str:
        return hosts.start_script(
            self.job, digest, command, extras=extras, follow=True, role="ray"
        )

    def _on_head(self, script: str) -> str:
        return self.client.ssh(gcloud.head_ssh(self.job, self._head, script))

    def _address(self) -> str:
        """Return the head's internal IP address."""
        found = self.client.ask(gcloud.head(self.job, "describe", self._head))
        if self.client.dry_run:
            return "HEAD"
        return str(found["networkInterfaces"][0]["networkIP"])

    def _parts(self) -> dict[str, Machines]:
        return {
            self._head: self._head_machine(),
            **{each.name: each.machines() for each in self._slices},
        }

    def _head_machine(self) -> Machines:
        found = self.client.ask(gcloud.head(self.job, "describe", self._head))
        if found is None:
            return Machines(state="absent", said="ABSENT")
        said = str(found.get("status"))
        label = found.get("labels", {}).get(gcloud.LABEL, "")
        taken = f"the name {self._head} is taken by another machine"
        return Machines(
            state=_INSTANCE.get(said, "unknown"),
            said=said,
            created=str(found.get("creationTimestamp", "")),
            wrong="" if label == self.job.name else taken,
        )

    def _remove(self, names: Sequence[str]) -> list[str]:
        left = []
        for each in self._slices:
            if each.name in names:
                left += each.remove()
        if self._head in names:
            command = gcloud.head(self.job, "delete", self._head)
            left += self.removed(command, f"{self._head} in {self.job.zone}")
        return left
