"""`CloudPlace`: what all places of Google Cloud share, foremost the job's bucket.

The code is uploaded to the bucket, and the run's files are fetched from it.
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

# Multi-region of a bucket -> prefix of the names of its regions.
_MULTI = {"US": "us-", "EU": "europe-", "ASIA": "asia-"}


class CloudPlace:
    """Base class of the places of Google Cloud."""

    def __init__(self, job: Job, more: Sequence[str], client: Client) -> None:
        """Store the arguments; run no command.

        Args:
            job: the run and its machines.
            more: further flags of the run.
            client: runs the cloud's programs.
        """
        self.job, self.more, self.client = job, tuple(more), client
        self._digest = ""  # of the code in the bucket; empty: not uploaded yet
        self._before: Outcome | None = None  # forgotten

    def check_bucket(self) -> None:
        """Raise ValueError if the bucket is missing, or in another region."""
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
                f"{region.upper()}: every checkpoint would travel between regions, at "
                f"a price; take a bucket in the zone's region"
            )

    def upload(self) -> str:
        """Upload the code unless it is in the bucket; return its digest."""
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
        """Return the run's outcome as its supervisor wrote it; None: never started."""
        try:
            text = self.client.run(gcloud.storage("cat", self.job.outcome_file))
        except NotFound:
            return None
        found = parse_outcome(text)
        return None if found == self._before else found

    def forget(self, before: Outcome) -> None:
        """Return None from `outcome` until the run has another one than `before`."""
        self._before = before

    def last_step(self) -> str:
        """Return when the run last wrote a step, ISO 8601; empty: never."""
        url = f"{self.job.directory}/{METRICS_FILE}"
        found = self.client.ask(gcloud.storage("objects", "describe", url))
        return str(found.get("update_time", "")) if found else ""

    def fetch(self, target: str) -> None:
        """Copy the run's files here, except checkpoints; there may be none yet.

        Raises:
            ValueError: the name of an object leads out of the directory.
        """
        url = f"{self.job.directory}/"
        try:
            listed = self.client.run(gcloud.storage("ls", f"{url}**"))
        except NotFound:
            return
        if not self.client.dry_run:
            Path(target).mkdir(parents=True, exist_ok=True)
            for line in listed.split("\n"):
                if line and not line.endswith("/"):  # a trailing / marks a folder
                    inside(Path(target), line.removeprefix(url), called=url)
        self.client.run(
            gcloud.storage(
                *("rsync", self.job.directory, target, "--recursive"),
                "--exclude=^(checkpoints|weights)/.*|^\\..*",
            )
        )

    def removed(self, command: Sequence[str], name: str) -> list[str]:
        """Run a command that removes something; return a line if that fails."""
        try:
            self.client.run(command)
        except NotFound:
            pass
        except (Refused, RuntimeError, ValueError) as error:
            return [f"{name}: {error}"]
        return []
