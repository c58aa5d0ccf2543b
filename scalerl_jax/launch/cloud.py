"""Machines of a cloud: the job's bucket, through gcloud, and what else they share.

Code goes into the bucket, and the run's files come from it.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from scalerl_jax.formats.paths import inside
from scalerl_jax.launch import gcloud, hosts
from scalerl_jax.launch.client import Client, NotFound
from scalerl_jax.launch.job import Job, region_of
from scalerl_jax.launch.outcome import Outcome, parse_outcome
from scalerl_jax.launch.place import Refused
from scalerl_jax.run.directory import METRICS_FILE

# Multi-regions of buckets -> how the regions of zones in them begin.
_MULTI = {"US": "us-", "EU": "europe-", "ASIA": "asia-"}


class CloudPlace:
    """Methods that all places of a cloud have."""

    def __init__(self, job: Job, more: Sequence[str], client: Client) -> None:
        """Ask for nothing yet.

        Args:
            job: what runs.
            more: further flags of the run.
            client: runs the cloud's programs.
        """
        self.job, self.more, self.client = job, tuple(more), client
        self._digest = ""  # of the code in the bucket

    def check_bucket(self) -> None:
        """Refuse a bucket that is not there, or in another region than the zone."""
        job = self.job
        found = self.client.ask(gcloud.bucket(job))
        if self.client.dry_run:
            return
        region = region_of(job.zone)
        if found is None:
            raise ValueError(
                f"--bucket={job.bucket}: there is no such bucket; gcloud storage "
                f"buckets create makes one, --location={region} near"
            )
        location = str(found.get("location", "")).upper()
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

    def outcome(self) -> Outcome | None:
        """Read the run's outcome, as the supervisor wrote it; None: never started."""
        try:
            text = self.client.run(gcloud.storage("cat", self.job.outcome_file))
        except NotFound:
            return None
        return parse_outcome(text)

    def last_step(self) -> str:
        """Return when the run last wrote a step, ISO 8601; empty: never."""
        url = f"{self.job.directory}/{METRICS_FILE}"
        found = self.client.ask(gcloud.storage("objects", "describe", url))
        return str(found.get("update_time", "")) if found else ""

    def fetch(self, target: str) -> None:
        """Bring the run's files here, all but checkpoints.

        Raises:
            ValueError: an object has a name that leads out of the directory.
        """
        url = f"{self.job.directory}/"
        listed = self.client.run(gcloud.storage("ls", f"{url}**"))
        if not self.client.dry_run:
            Path(target).mkdir(parents=True, exist_ok=True)
            for line in listed.split("\n"):
                if line and not line.endswith("/"):  # which marks a folder
                    inside(Path(target), line.removeprefix(url), called=url)
        self.client.run(
            gcloud.storage(
                *("rsync", self.job.directory, target, "--recursive"),
                "--exclude=^(checkpoints|weights)/.*|^\\..*",
            )
        )

    def removed(self, command: Sequence[str], name: str) -> list[str]:
        """Run a command that removes something; return a line if it stays."""
        try:
            self.client.run(command)
        except NotFound:
            pass
        except (Refused, RuntimeError, ValueError) as error:
            return [f"{name}: {error}"]
        return []
