"""Scripts for a host, by ssh: to get the code, to start a supervisor, to end it.

Each script may be run again at any time.  A host has everything in ~/scalerl_jax/NAME:
code, a virtual environment, log, and the supervisor's number.  These places are alike
on every machine, since settings of a run hold paths of the code's own files.
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


def check_config(job: Job) -> None:
    """Refuse a config that hosts will not have: archive and image bring configs/ alone.

    Raises:
        ValueError: it lies elsewhere.
    """
    path = Path(job.config.partition(":")[0])
    if str(path) in names():
        return
    if path.is_absolute() or path.parts[0] != "configs" or ".." in path.parts:
        raise ValueError(
            f"--config={job.config} is not brought to the hosts: put it into "
            f"configs/ of this clone, and start there"
        )


def pack_code(root: Path = ROOT) -> tuple[str, bytes]:
    """Return the digest and the archive of the code, the same bytes for the same code.

    Raises:
        ValueError: there is no source tree, but an installed package.
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
    """Return an entry without what differs between two machines."""
    if any(part in entry.name for part in _SKIPPED):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
    return entry


def code_url(job: Job, digest: str) -> str:
    """Return where the archive lies in the bucket."""
    return f"{job.bucket}/code/{digest[:16]}.tar.gz"


def _install(job: Job, digest: str, extras: str) -> str:
    """Return the lines that bring the code and its packages, unless they are there."""
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
  gcsfuse --implicit-dirs {part}{shlex.quote(bucket)} {place} > /dev/null
fi
"""


def start_script(
    job: Job,
    digest: str,
    command: Sequence[str],
    *,
    extras: str,
    follow: bool = False,
    role: str = "run",
) -> str:
    """Return the script that starts the supervisor of a command, if none runs.

    Args:
        command: after the name of the virtual environment's programs.
        extras: of the package, that the host needs.
        follow: the command serves a head on another machine.
        role: names log and number where a host has several supervisors.
    """
    program, *arguments = command
    supervised = job.supervised(
        [f"../venv/bin/{program}", *arguments],
        python="../venv/bin/python",
        follow=follow,
    )
    return f"""set -eu
mkdir -p ~/scalerl_jax/{job.name} && cd ~/scalerl_jax/{job.name}
if [ -e {role}.pid ] && kill -0 "$(cat {role}.pid)" 2> /dev/null; then
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
    """Return the script that runs a line of Python where the code was installed."""
    return f"""set -eu
cd ~/scalerl_jax/{job.name}/code
../venv/bin/python -c {shlex.quote(code)}
"""


def end_script(job: Job, *, grace_s: int) -> str:
    """Return the script that has the run save itself, and waits for that."""
    return f"""cd ~/scalerl_jax/{job.name} 2> /dev/null || exit 0
[ -e run.pid ] || exit 0
kill -TERM "$(cat run.pid)" 2> /dev/null || exit 0
for _ in $(seq {grace_s}); do
  kill -0 "$(cat run.pid)" 2> /dev/null || exit 0
  sleep 1
done
"""


def log_script(job: Job, lines: int) -> str:
    """Return the script that shows the last lines of a host, with its name."""
    tail = f"tail --quiet --lines={lines} ~/scalerl_jax/{job.name}/*.log 2> /dev/null"
    return f'{tail} | sed "s/^/$(hostname): /"'
