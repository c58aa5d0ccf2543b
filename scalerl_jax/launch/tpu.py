"""`TpuPlace`: a TPU slice, as a TPU VM or a queued resource, through gcloud."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from scalerl_jax.launch import gcloud, hosts, ray_token
from scalerl_jax.launch.client import Client
from scalerl_jax.launch.cloud import CloudPlace
from scalerl_jax.launch.job import Job
from scalerl_jax.launch.place import Machines, Refused, say

GRACE_S = 60  # seconds that `end` waits for the run's save
_GONE_TRIES = 40  # polls of a slice that is being removed


class TpuPlace(CloudPlace):
    """One slice, with the job's name or another."""

    def __init__(
        self,
        job: Job,
        more: Sequence[str],
        client: Client,
        *,
        poll_s: float = 15.0,
        name: str = "",
    ) -> None:
        """Store the arguments; run no command.

        Args:
            job: the run and its machines.
            more: further flags of the run.
            client: runs gcloud.
            poll_s: seconds between two polls of a slice that is being removed.
            name: the slice's name; empty: the job's.
        """
        super().__init__(job, more, client)
        self.name, self._poll_s = name or job.name, poll_s

    # -- before anything is created ---------------------------------------------------

    def check(self) -> None:
        """Raise ValueError if zone, topology or bucket is missing; upload the code."""
        hosts.check_config(self.job)
        self._check_zone()
        self.check_bucket()
        self.upload()

    def _check_zone(self) -> None:
        job, slice = self.job, self.job.slice
        found = self.client.ask(gcloud.types(job))
        if self.client.dry_run:
            return
        known = sorted(str(each.get("type", "")) for each in found or [])
        if slice.type not in known:
            same = [each for each in known if each.startswith(slice.kind.types[0])]
            raise ValueError(
                f"--topology={job.topology} is {slice.type}, and {job.zone} has "
                f"{', '.join(same or known) or 'no TPUs'}; gcloud compute tpus "
                f"locations list shows the zones"
            )

    # -- the machines -----------------------------------------------------------------

    def machines(self) -> Machines:
        """Return the state of the slice, as the cloud reports it."""
        found = self.client.ask(gcloud.describe(self.job, self.name))
        if found is None:
            return Machines(state="absent", said="ABSENT")
        if self.job.place == "tpu_vm":
            said, states, node = str(found.get("state")), gcloud.NODE, found
        else:
            said, states = str(found.get("state", {}).get("state")), gcloud.QUEUED
            specs = found.get("tpu", {}).get("nodeSpec") or [{}]
            node = specs[0].get("node", {})
        return Machines(
            state=states.get(said, "unknown"),
            said=said,
            created=str(found.get("createTime", "")),
            wrong=self._wrong(node),
        )

    def _wrong(self, node: dict[str, Any]) -> str:
        """Return why the slice of this name is another job's; "": it is this job's."""
        label = node.get("labels", {}).get(gcloud.LABEL, "")
        kind = str(node.get("acceleratorType", ""))
        slice = self.job.slice
        if label and label != self.job.name:
            return f"the name {self.name} is taken by machines of the run {label}"
        if kind and kind != slice.type:
            count, _ = self.job.slices
            theirs = f"{count}*{kind}" if count > 1 else kind
            return (
                f"the name {self.name} is taken by a {kind}, and --topology="
                f"{self.job.topology} is a {slice.type}; take another --name, or "
                f"`launch stop --topology={theirs}` first"
            )
        return ""

    def create(self) -> None:
        """Request the slice."""
        self.client.run(gcloud.create(self.job, self.name))

    def replace(self) -> list[str]:
        """Remove the slice, which is broken."""
        return self.remove()

    def remove(self) -> list[str]:
        """Remove the slice, and wait until it is gone."""
        place = f"{self.name} in {self.job.zone}"
        left = self.removed(gcloud.delete(self.job, self.name), place)
        if left or self.client.dry_run:
            return left
        tries, there = 0, self.machines()
        while there.state != "absent" and tries < _GONE_TRIES:
            time.sleep(self._poll_s)
            tries, there = tries + 1, self.machines()
        if there.state == "absent":
            return []
        return [f"{place}, which is still {there.said}"]

    # -- the run ----------------------------------------------------------------------

    def start(self) -> str:
        """Start the supervisor on every host without one; return a line about it."""
        command = self.job.command(self.more)
        if self.job.ray:
            ray_token.upload(self.job.ray_token, self.client)
        extras = "tpu,gcs,ray" if self.job.ray else "tpu,gcs"
        script = hosts.start_script(self.job, self.upload(), command, extras=extras)
        said = self.on_hosts(script)
        begun = [line for line in said.splitlines() if line.endswith("starts")]
        return f"the run starts on {len(begun)} hosts" if begun else "it runs already"

    def end(self) -> None:
        """Ask the run to save itself; do not wait for a host that does not answer."""
        end_run(self.job, self.on_hosts)

    def logs(self, lines: int) -> str:
        """Return the last lines of every host."""
        return self.on_hosts(hosts.log_script(self.job, lines))

    def on_hosts(self, script: str) -> str:
        """Run a script on every host; return their output."""
        return self.client.ssh(gcloud.ssh(self.job, self.name, script))


def end_run(job: Job, ssh: Callable[[str], str]) -> None:
    """Ask a run over ssh to save itself; report a failure instead of raising it."""
    try:
        ssh(hosts.end_script(job, grace_s=GRACE_S))
    except (Refused, RuntimeError, ValueError) as error:
        say(f"the run could not be asked to save itself: {error}")
