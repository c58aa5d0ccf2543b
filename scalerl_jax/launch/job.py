"""`Job`, a run and its machines, from the commands' flags or from a file.

The file is TOML or JSON with the flags' names and is never executed; flags override it.
"""

import argparse
import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalerl_jax.formats.bounded import read_bytes
from scalerl_jax.formats.reading import is_remote, parse_json
from scalerl_jax.launch.outcome import FILE
from scalerl_jax.machines.slices import Slice, parse_slice

PLACES = {
    "local": "processes of this machine, with a directory instead of a bucket",
    "tpu_vm": "one TPU VM of one host",
    "queued_resource": "a slice of one or more hosts, requested as a queued resource",
    "ray_tpu": "slices as queued resources, and a CPU machine with head and controller",
    "gke": "slices of a GKE cluster that xpk has created, as a workload of xpk",
}
# docs.cloud.google.com/tpu/docs/runtimes, read in November 2026.
RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
_SPOT_GRACE_S, _GRACE_S = 30, 55
_XPK_NAME = 28  # _SUPER_SLICING_WORKLOAD_NAME_LIMIT of xpk 1.16
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_ZONE = re.compile(r"[a-z]+-[a-z]+\d+-[a-z]")


def _field(default: Any, meaning: str) -> Any:
    return dataclasses.field(default=default, metadata={"meaning": meaning})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run and its machines; `make_job` checks that the fields fit together."""

    place: str = _field("", f"where it runs: {', '.join(PLACES)}")
    name: str = _field("", "of run and machines: a-z, 0-9 and -, at most 40 characters")
    config: str = _field("", "settings of the run: a name (tiny), or a Python file")
    bucket: str = _field("", "gs://BUCKET[/PATH] for code and runs; local: a directory")
    project: str = _field("", "of Google Cloud")
    zone: str = _field("", "for example us-east5-a")
    topology: str = _field("", "v6e:4x4 or v6e-16; 2*v6e:4x4 for two such slices")
    spot: bool = _field(False, "cheaper machines that may be preempted")
    reserved: bool = _field(False, "machines of your reservation")
    runtime: str = _field("", "runtime version of TPU VMs; empty: the generation's")
    service_account: str = _field("", "of the machines; empty: the project's default")
    network: str = _field("", "of the machines; empty: default")
    subnetwork: str = _field("", "of the machines; empty: the network's own")
    internal_ips: bool = _field(False, "machines get no external IP addresses")
    head_machine: str = _field("n2-standard-16", "ray_tpu: type of the head's machine")
    cluster: str = _field("", "gke: name of the cluster")
    image: str = _field("", "gke: image of launch/Dockerfile, in a registry")
    storage: str = _field("", "gke: the bucket's name in `xpk storage attach`")
    price_per_chip_hour: float = _field(0.0, "for the estimates; there is no default")
    mount: str = _field("/mnt/scalerl_jax", "mount point of a bucket that hosts share")
    failures: int = _field(5, "in a row, after which a run is given up")
    preflight: str = _field("require", "require, or skip: do not check what fits")
    files: str = _field("", "folder here for the run's files; empty: runs/NAME")

    @property
    def slices(self) -> tuple[int, Slice | None]:
        """Number and kind of the slices; (0, None) for `place` local."""
        if not self.topology:
            return 0, None
        count, _, shape = self.topology.rpartition("*")
        return int(count or 1), parse_slice(shape)

    @property
    def slice(self) -> Slice:
        """The kind of the slices."""
        found = self.slices[1]
        assert found is not None, "`make_job` requires a topology"
        return found

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        count, slice = self.slices
        return count * slice.num_chips if slice else 0

    @property
    def directory(self) -> str:
        """The run's directory: its path or URL on this machine."""
        return f"{self.bucket.rstrip('/')}/{self.name}"

    @property
    def is_shared(self) -> bool:
        """True if the machines access the directory through a mount of the bucket."""
        return self.place in ("ray_tpu", "gke") or (
            self.place == "queued_resource" and self.slice.num_hosts > 1
        )

    @property
    def workdir(self) -> str:
        """The run's directory: its path or URL on the run's machines."""
        return f"{self.mount}/{self.name}" if self.is_shared else self.directory

    @property
    def outcome_file(self) -> str:
        """Path or URL, on this machine, of the file with the run's state."""
        return f"{self.directory}/{FILE}"

    def command(
        self, more: Sequence[str], *, python: Sequence[str] = ("python",)
    ) -> list[str]:
        """Return the command of the run, with the further flags `more`."""
        given = any(each.partition("=")[0] == "--ray" for each in more)
        return [
            *(*python, "-m", "scalerl_jax.main", f"--config={self.config}"),
            f"--workdir={self.workdir}",
            *([f"--ray={self.ray}"] if self.ray and not given else []),
            *more,
        ]

    def supervised(
        self,
        command: Sequence[str],
        *,
        python: Sequence[str] = ("python",),
        follow: bool = False,
    ) -> list[str]:
        """Return the supervisor's command line for `command`; `follow`: see `hosts`."""
        return [
            *(*python, "-m", "scalerl_jax.launch", "supervise"),
            *(f"--workdir={self.workdir}", f"--failures={self.failures}"),
            f"--grace-s={self.grace_s}",
            *([f"--ray-token={self.ray_token}"] if self.ray else []),
            *(["--follow"] if follow else []),
            *("--", *command),
        ]

    @property
    def grace_s(self) -> int:
        """Seconds that the supervisor leaves the run between SIGTERM and SIGKILL.

        A stop leaves a machine on demand 60 (`GRACE_S` of the places).
        """
        return _SPOT_GRACE_S if self.spot or self.place == "local" else _GRACE_S

    @property
    def ray_token(self) -> str:
        """URL of the object with the token of the hosts' Ray cluster."""
        return f"{self.bucket}/tokens/{self.name}"

    @property
    def ray(self) -> str:
        """Value of --ray, by which the hosts find each other; empty: a single host."""
        if self.place == "ray_tpu":
            return "auto"
        hosts = self.slice.num_hosts if self.is_shared else 1
        if self.place == "gke":  # xpk's machines have at most four chips
            hosts = self.chips // 4
        return "slice" if hosts > 1 else ""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a job to a command's parser."""
    parser.add_argument("--job", metavar="FILE", help="TOML or JSON with these names")
    for field in dataclasses.fields(Job):
        flag = f"--{field.name.replace('_', '-')}"
        meaning = field.metadata["meaning"]
        if field.default not in ("", 0.0, False):
            meaning += f" (default {field.default})"
        if isinstance(field.default, bool):
            action: Any = argparse.BooleanOptionalAction
            parser.add_argument(flag, action=action, default=None, help=meaning)
        else:
            kind = type(field.default)
            parser.add_argument(flag, type=kind, default=None, help=meaning)


def read_job(flags: argparse.Namespace) -> Job:
    """Return the job that flags and file describe.

    Raises:
        ValueError: a name or a value in them is wrong.
    """
    values = read_file(flags.job) if flags.job else {}
    fields = [field.name for field in dataclasses.fields(Job)]
    given = {name: getattr(flags, name) for name in fields}
    return make_job(
        values | {name: value for name, value in given.items() if value is not None}
    )


def read_file(file: str, *, flag: str = "--job") -> dict[str, Any]:
    """Return the settings of a job in a file, TOML or JSON.

    Raises:
        ValueError: the file cannot be read, or has a wrong name, or a wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(Job)}
    values = _parse_file(file, flag)
    for name, value in values.items():
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{file}: {name} is not a setting of a job{meant}")
        kind = type(fields[name].default)
        if kind is float and type(value) is int:
            values[name] = float(value)
        elif type(value) is not kind:
            raise ValueError(
                f"{file}: {name} = {value!r} must be of the type {kind.__name__}"
            )
    return values


def _parse_file(name: str, flag: str) -> dict[str, Any]:
    path = Path(name)
    try:
        data = read_bytes(path)
    except ValueError as error:
        raise ValueError(f"{flag}={name} cannot be read: {error}") from error
    try:
        if path.suffix == ".json":
            values = parse_json(data)
        else:
            values = tomllib.loads(data.decode())
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{flag}={name} is neither TOML nor JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{flag}={name} must hold names and values")
    return values


def make_job(values: Mapping[str, Any]) -> Job:
    """Return a job whose settings fit together.

    Raises:
        ValueError: a setting is missing or invalid, or two contradict each other.
    """
    job = Job(**values)
    if job.place not in PLACES:
        raise ValueError(f"--place={job.place}: choose from {', '.join(PLACES)}")
    meanings = {each.name: each.metadata["meaning"] for each in dataclasses.fields(job)}
    for name in _needed(job.place):
        if not getattr(job, name):
            raise ValueError(
                f"--{name} is missing ({meanings[name]}); --place={job.place} needs it"
            )
    if not _NAME.fullmatch(job.name):
        raise ValueError(
            f"--name={job.name} must begin with a letter, end with a letter or digit "
            f"and have nothing else in it but a-z, 0-9 and -, at most 40 in all"
        )
    if job.preflight not in ("require", "skip"):
        raise ValueError(f"--preflight={job.preflight}: choose from require, skip")
    price = job.price_per_chip_hour
    if not math.isfinite(price) or price < 0 or job.failures < 0:
        raise ValueError(
            f"--price-per-chip-hour={price:g} and --failures={job.failures} must be 0 "
            f"or more"
        )
    if job.place == "local":
        if is_remote(job.bucket):
            raise ValueError(
                f"--bucket={job.bucket}: --place=local keeps the run in a directory of "
                f"this machine; name one"
            )
        return job
    _check_cloud(job)
    return job


def _needed(place: str) -> list[str]:
    """Return the settings that `place` requires."""
    cloud = ["project", "zone", "topology"] if place != "local" else []
    cluster = ["cluster", "image", "storage"] if place == "gke" else []
    return ["name", "bucket", *cloud, *cluster]


def _check_cloud(job: Job) -> None:
    """Raise ValueError if Google Cloud cannot provide the job's machines."""
    if not re.fullmatch(r"gs://[a-z0-9][-_.a-z0-9]+(/[\w.-]+)*", job.bucket):
        raise ValueError(
            f"--bucket={job.bucket} is no bucket of Google Cloud Storage: write "
            f"gs://BUCKET or gs://BUCKET/PATH, with no / at the end"
        )
    if not _ZONE.fullmatch(job.zone):
        raise ValueError(
            f"--zone={job.zone} is no zone: us-east5-a is one, us-east5 a region"
        )
    if not re.fullmatch(r"([1-9]\d{0,2}\*)?[^*]+", job.topology):
        raise ValueError(
            f"--topology={job.topology}: write v6e:4x4, v6e-16, or 2*v6e:4x4"
        )
    count, _ = job.slices
    if count > 1 and job.place not in ("ray_tpu", "gke"):
        raise ValueError(
            f"--topology={job.topology} with --place={job.place}: several slices are "
            f"--place=ray_tpu or gke"
        )
    if job.place == "tpu_vm" and job.slice.num_hosts > 1:
        raise ValueError(
            f"--place=tpu_vm is for slices of one host, and {job.slice.name} has "
            f"{job.slice.num_hosts}: take --place=queued_resource"
        )
    if job.place == "gke":
        _check_gke(job)
    if job.spot and job.reserved:
        raise ValueError("--spot and --reserved exclude each other; choose one")


def _check_gke(job: Job) -> None:
    """Raise ValueError for settings that the cluster fixes, or that xpk cannot do."""
    given = [name for name in ("spot", "reserved") if getattr(job, name)]
    if given:
        raise ValueError(
            f"--{given[0]} with --place=gke: the cluster's node pools are spot, "
            f"reserved or on demand, as set by `xpk cluster create`"
        )
    if "/" in job.bucket.removeprefix("gs://"):
        raise ValueError(
            f"--bucket={job.bucket} with --place=gke: the pods mount a whole bucket; "
            f"write gs://{job.bucket.removeprefix('gs://').partition('/')[0]}"
        )
    if len(job.name) > _XPK_NAME:
        raise ValueError(
            f"--name={job.name} has {len(job.name)} characters; --place=gke takes at "
            f"most {_XPK_NAME}, since Kueue and GKE add theirs"
        )


def runtime_of(job: Job) -> str:
    """Return the runtime version of the job's TPU VMs."""
    return job.runtime or RUNTIMES[job.slice.generation]


def region_of(zone: str) -> str:
    """Return the region of a zone."""
    return zone.rpartition("-")[0]
