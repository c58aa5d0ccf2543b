"""Slices of TPUs as machines: a TPU VM, or a queued resource, through gcloud."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalerl_jax.launch import gcloud, hosts
from scalerl_jax.launch.client import Client, NotFound
from scalerl_jax.launch.job import Job, region_of
from scalerl_jax.launch.keep import Refused, say
from scalerl_jax.launch.outcome import Outcome, parse_outcome
from scalerl_jax.launch.place import Machines
from scalerl_jax.pod.slices import parse_type
from scalerl_jax.utils.run_directory import METRICS_FILE

GRACE_S = 60  # for the save that `end` asks for
_GONE_TRIES = 40  # looks for a slice that is being removed
# Multi-regions of buckets -> how the regions of zones in them begin.
_MULTI = {"US": "us-", "EU": "europe-", "ASIA": "asia-"}


class TpuPlace:
    """One slice, by the job's name or another."""

    def __init__(
        self,
        job: Job,
        more: Sequence[str],
        client: Client,
        *,
        poll_s: float = 15.0,
        name: str = "",
    ) -> None:
        """Ask for nothing yet.

        Args:
            job: what runs.
            more: further flags of the run.
            client: runs gcloud.
            poll_s: between two looks for a slice that is being removed.
            name: of the slice; the job's where it is empty.
        """
        self.job, self.client, self.name = job, client, name or job.name
        self._more, self._poll_s = tuple(more), poll_s
        self._digest = ""

    # -- before anything is made ------------------------------------------------------

    def check(self) -> None:
        """Refuse a zone, a topology or a bucket that is not there; bring the code."""
        self._check_config()
        self._check_zone()
        self._check_bucket()
        self.upload()

    def _check_config(self) -> None:
        """Refuse a config that the hosts will not have: they get configs/ alone."""
        path = Path(self.job.config.partition(":")[0])
        if path.is_absolute() or path.parts[0] != "configs" or ".." in path.parts:
            raise ValueError(
                f"--config={self.job.config} is not brought to the hosts: put it into "
                f"configs/ of this clone, and start there"
            )

    def _check_zone(self) -> None:
        job, slice = self.job, self.job.slice
        found = self.client.ask(gcloud.types(job))
        if self.client.dry_run:
            return
        known = gcloud.types_of(found or [])
        if slice.type not in known:
            same = [each for each in known if each.startswith(slice.kind.types[0])]
            raise ValueError(
                f"--topology={job.topology} is {slice.type}, and {job.zone} has "
                f"{', '.join(same or known) or 'no TPUs'}; gcloud compute tpus "
                f"locations list shows the zones"
            )

    def _check_bucket(self) -> None:
        job = self.job
        found = self.client.ask(gcloud.bucket(job))
        if self.client.dry_run:
            return
        if found is None:
            raise ValueError(
                f"--bucket={job.bucket}: there is no such bucket; gcloud storage "
                f"buckets create makes one, --location={region_of(job.zone)} near"
            )
        location = str(found.get("location", "")).upper()
        region = region_of(job.zone)
        near = (
            region.startswith(_MULTI[location])
            if location in _MULTI
            else (location == region.upper())
        )
        if not near:
            raise ValueError(
                f"--bucket={job.bucket} is in {location}, and --zone={job.zone} in "
                f"{region.upper()}: every checkpoint would travel, and be paid for; "
                f"take a bucket there"
            )

    def upload(self) -> str:
        """Bring the code into the bucket, unless it is there; return its digest."""
        if self._digest:
            return self._digest
        digest, data = hosts.pack_code()
        url = hosts.code_url(self.job, digest)
        try:
            there = self.client.run(gcloud.storage("ls", url))
        except NotFound:
            there = ""
        if not there:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "code.tar.gz"
                file.write_bytes(data)
                shown = file.name if self.client.dry_run else str(file)
                self.client.run(gcloud.storage("cp", shown, url))
        self._digest = digest
        return digest

    # -- the machines -----------------------------------------------------------------

    def machines(self) -> Machines:
        """Return what the cloud says."""
        found = self.client.ask(gcloud.describe(self.job, self.name))
        if found is None:
            return Machines(state="absent", said="ABSENT")
        if self.job.place == "tpu_vm":
            said, states, node = str(found.get("state")), gcloud.NODE, found
        else:
            said, states = str(found.get("state", {}).get("state")), gcloud.QUEUED
            specs = found.get("tpu", {}).get("nodeSpec") or [{}]
            node = specs[0].get("node", {})
        if said not in states:
            raise RuntimeError(
                f"{self.name} is in a state that is not known here: {said}; look at it "
                f"with gcloud, and remove it with `launch stop`"
            )
        return Machines(
            state=states[said],
            said=said,
            created=str(found.get("createTime", "")),
            wrong=self._wrong(node),
        )

    def _wrong(self, node: dict[str, Any]) -> str:
        """Return why a slice of our name is not ours; empty if it is."""
        label = node.get("labels", {}).get(gcloud.LABEL, "")
        kind = str(node.get("acceleratorType", ""))
        slice = self.job.slice
        if label and label != self.job.name:
            return f"the name {self.name} is taken by machines of the run {label}"
        same = not kind or parse_type(kind)[0] == slice.generation
        if not same or (kind and kind != slice.type):
            return (
                f"the name {self.name} is taken by a {kind}, and --topology="
                f"{self.job.topology} is a {slice.type}; take another --name, or "
                f"`launch stop` first"
            )
        return ""

    def create(self) -> None:
        """Ask for the slice."""
        self.client.run(gcloud.create(self.job, self.name))

    def replace(self) -> list[str]:
        """Remove what is broken."""
        return self.remove()

    def remove(self) -> list[str]:
        """Remove the slice, and wait until it is gone."""
        try:
            self.client.run(gcloud.delete(self.job, self.name))
        except NotFound:
            return []
        except (Refused, RuntimeError, ValueError) as error:
            return [f"{self.name} in {self.job.zone}: {error}"]
        if self.client.dry_run:
            return []
        tries, there = 0, self.machines()
        while there.state != "absent" and tries < _GONE_TRIES:
            time.sleep(self._poll_s)
            tries, there = tries + 1, self.machines()
        if there.state == "absent":
            return []
        return [f"{self.name} in {self.job.zone}, which is still {there.said}"]

    # -- the run ----------------------------------------------------------------------

    def start(self) -> str:
        """Start the supervisor on every host where none runs."""
        command = self.job.command(self._more)
        extras = "tpu,gcs,ray" if self.job.ray else "tpu,gcs"
        script = hosts.start_script(self.job, self.upload(), command, extras=extras)
        said = self.client.ssh(gcloud.ssh(self.job, self.name, script))
        begun = [line for line in said.splitlines() if line.endswith("starts")]
        return f"the run starts on {len(begun)} hosts" if begun else "it runs already"

    def end(self) -> None:
        """Have the run save itself; a host that does not answer is not waited for."""
        script = hosts.end_script(self.job, grace_s=GRACE_S)
        try:
            self.client.ssh(gcloud.ssh(self.job, self.name, script))
        except (Refused, RuntimeError, ValueError) as error:
            say(f"the run could not be asked to save itself: {error}")

    def outcome(self) -> Outcome | None:
        """Return how the run stands, from the bucket."""
        try:
            text = self.client.run(gcloud.storage("cat", self.job.outcome_file))
        except NotFound:
            return None
        return parse_outcome(text)

    def last_step(self) -> str:
        """Return when the run last wrote a step, as the bucket says."""
        url = f"{self.job.directory}/{METRICS_FILE}"
        found = self.client.ask(gcloud.storage("objects", "describe", url))
        return str(found.get("update_time", "")) if found else ""

    def logs(self, lines: int) -> str:
        """Return the last lines of every host."""
        script = hosts.log_script(self.job, lines)
        return self.client.ssh(gcloud.ssh(self.job, self.name, script))

    def fetch(self, target: str) -> None:
        """Bring the run's files here, all but checkpoints."""
        if not self.client.dry_run:
            Path(target).mkdir(parents=True, exist_ok=True)
        self.client.run(
            gcloud.storage(
                *("rsync", self.job.directory, target, "--recursive"),
                "--exclude=^(checkpoints|weights)/.*|^\\..*",
            )
        )
