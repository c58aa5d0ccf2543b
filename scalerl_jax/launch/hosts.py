"""Shell scripts that run on a host over ssh: install code, start and end a supervisor.

Each script may be repeated at any time.  A host keeps everything in ~/scalerl_jax/NAME:
code, virtual environment, log, and the supervisor's process id.  The paths are equal
on all machines, since settings of a run contain paths of the code's own files.
"""

import gzip
import hashlib
import io
import shlex
import tarfile
from collections.abc import Sequence
from pathlib import Path

import scalerl_jax
from scalerl_jax.config.names import names
from scalerl_jax.launch.job import Job

ROOT = Path(scalerl_jax.__file__).resolve().parents[1]
_CODE = ("scalerl_jax", "configs", "setup.py", "pyproject.toml", "constraints.txt")
_TEXTS = ("README.md", "LICENSE")  # that the package's description needs
_SKIPPED = ("__pycache__", ".egg-info")
# Of gcsfuse.  Without the second one no directory with files can be renamed (errno
# EMFILE) in a bucket without a hierarchical namespace, and no checkpoint completed.
MOUNT_OPTIONS = ("implicit-dirs", "rename-dir-limit=200000")


def check_config(job: Job) -> None:
    """Check that hosts will have the config: archive and image contain only configs/.

    Raises:
        ValueError: the config is outside configs/.
    """
    path = Path(job.config.partition(":")[0])
    if str(path) in names():
        return
    if path.is_absolute() or path.parts[0] != "configs" or ".." in path.parts:
        raise ValueError(
            f"--config={job.config} is not copied to the hosts: move it into "
            f"configs/ of this clone, and start from the clone"
        )


def pack_code(root: Path = ROOT) -> tuple[str, bytes]:
    """Return digest and archive of the code; equal code gives equal bytes.

    Raises:
        ValueError: the package is installed without its source tree.
    """
    if not (root / "setup.py").is_file():
        raise ValueError(
            f"{root} is no source tree of this package; start `launch` in a clone of it"
        )
    data = io.BytesIO()
    with gzip.GzipFile(fileobj=data, mode="wb", mtime=0) as packed:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name in (*_CODE, *_TEXTS):
                archive.add(root / name, arcname=name, filter=_plain)
    return hashlib.sha256(data.getvalue()).hexdigest(), data.getvalue()


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return an archive entry without owner, time and other differences of machines."""
    if any(part in entry.name for part in _SKIPPED):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
    return entry


def code_url(job: Job, digest: str) -> str:
    """Return the archive's URL in the bucket."""
    return f"{job.bucket}/code/{digest[:16]}.tar.gz"


def _install(job: Job, digest: str, extras: str) -> str:
    """Return the lines that install the code and its packages, unless present."""
    return f"""
if [ "$(cat code/.ready 2> /dev/null)" != {digest} ]; then
  gcloud storage cp {shlex.quote(code_url(job, digest))} code.tar.gz
  echo "{digest}  code.tar.gz" | sha256sum --check --quiet
  rm -rf code && mkdir code
  tar --extract --gzip --file=code.tar.gz --directory=code
  command -v uv > /dev/null || python3 -m pip install --quiet --user uv
  PATH="$HOME/.local/bin:$PATH"
  [ -e venv/bin/python ] || uv venv --quiet --python=3.11 venv
  uv pip install --quiet --python=venv/bin/python \\
    --constraint=code/constraints.txt --editable="code[{extras}]"
  echo {digest} > code/.ready
fi
"""


def _mount(job: Job) -> str:
    """Return the lines that mount the bucket as a directory, unless it is mounted."""
    bucket, _, path = job.bucket.removeprefix("gs://").partition("/")
    part = f"--only-dir={shlex.quote(path)} " if path else ""
    place = shlex.quote(job.mount)
    options = " ".join(f"--{option}" for option in MOUNT_OPTIONS)
    return f"""
if ! mountpoint --quiet {place}; then
  if ! command -v gcsfuse > /dev/null; then
    repository="gcsfuse-$(lsb_release --codename --short)"
    key=/usr/share/keyrings/cloud.google.asc
    packages=https://packages.cloud.google.com/apt
    curl --silent --show-error $packages/doc/apt-key.gpg | sudo tee "$key" > /dev/null
    echo "deb [signed-by=$key] $packages $repository main" \\
      | sudo tee /etc/apt/sources.list.d/gcsfuse.list > /dev/null
    sudo apt-get update --quiet=2 && sudo apt-get install --yes --quiet=2 gcsfuse
  fi
  sudo mkdir --parents {place} && sudo chown "$(id --user)" {place}
  gcsfuse {options} {part}{shlex.quote(bucket)} {place} > /dev/null
fi
"""


def _runs(role: str) -> str:
    """Return the command that tells whether the supervisor of a role runs.

    The number of one that ended, as at a host's restart, may be another program's now.
    """
    process = f'"/proc/$(cat {role}.pid 2> /dev/null)/cmdline"'
    return f"grep --quiet --text scalerl_jax.launch {process} 2> /dev/null"


def start_script(
    job: Job,
    digest: str,
    command: Sequence[str],
    *,
    extras: str,
    follow: bool = False,
    role: str = "run",
) -> str:
    """Return the script that starts the supervisor of a command, unless one runs.

    Args:
        command: a program of the virtual environment, and its arguments.
        extras: extras of the package that the host needs.
        follow: the command serves a head on another machine.
        role: name of log and process id file, for hosts with several supervisors.
    """
    program, *arguments = command
    supervised = job.supervised(
        [f"../venv/bin/{program}", *arguments],
        python=["../venv/bin/python"],
        follow=follow,
    )
    return f"""set -eu
mkdir -p ~/scalerl_jax/{job.name} && cd ~/scalerl_jax/{job.name}
if {_runs(role)}; then
  echo "$(hostname): {role} runs already"
  exit 0
fi
{_mount(job) if job.is_shared else ""}{_install(job, digest, extras)}
cd code
nohup setsid {shlex.join(supervised)} \\
  >> ../{role}.log 2>&1 < /dev/null &
echo $! > ../{role}.pid
echo "$(hostname): {role} starts"
"""


def python_script(job: Job, code: str) -> str:
    """Return the script that runs Python source with the installed code."""
    return f"""set -eu
cd ~/scalerl_jax/{job.name}/code
../venv/bin/python -c {shlex.quote(code)}
"""


def end_script(job: Job, *, grace_s: int) -> str:
    """Return the script that sends SIGTERM to the supervisor and waits for its end."""
    return f"""cd ~/scalerl_jax/{job.name} 2> /dev/null || exit 0
{_runs("run")} || exit 0
kill -TERM "$(cat run.pid)" 2> /dev/null || exit 0
for _ in $(seq {grace_s}); do
  {_runs("run")} || exit 0
  sleep 1
done
"""


def log_script(job: Job, lines: int) -> str:
    """Return the script that prints a host's last log lines, each with its name."""
    tail = f"tail --quiet --lines={lines} ~/scalerl_jax/{job.name}/*.log 2> /dev/null"
    return f'{tail} | sed "s/^/$(hostname): /"'
