"""A folder with a fake gcloud on PATH, hosts that are folders, and a bucket."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import small_bucket
import small_run

HERE = Path(__file__).parent
# What a host has beside the machine's own programs.  A virtual environment's Python is
# that of the tests; where `run` is given it stands for the run itself.
PROGRAMS = {
    "uv": """#!/bin/bash
if [ "$1" = venv ]; then
  mkdir -p venv/bin
  cat > venv/bin/python <<'END'
#!/bin/bash
if [ "$1" = -c ]; then  # how many chips Ray has
  echo chips 16
  exit
fi
if [ "$2" = scalerl_jax.main ] && [ -n "$FAKE_RUN" ]; then
  shift 2
  PYTHONPATH=$PWD exec {python} "$FAKE_RUN" "$@"
fi
exec {python} "$@"
END
  cat > venv/bin/ray <<'END'
#!/bin/bash
file="$RAY_AUTH_TOKEN_PATH"
echo "$RAY_AUTH_MODE $(stat -c %a "$file") $(cat "$file")" >> "$FAKE_CLOUD/tokens.txt"
exec sleep 1000
END
  chmod +x venv/bin/python venv/bin/ray
else
  echo "$@" >> "$FAKE_CLOUD/installed.txt"
fi
""",
    # A bucket is mounted: what is written there is in the bucket of the emulator.
    "mountpoint": "#!/bin/bash\nexit 0\n",
    "gcloud": """#!/bin/bash
exec {python} -IS {here}/fake_gcloud.py "$@"
""",
    "xpk": """#!/bin/bash
exec {python} -S {here}/fake_gke.py xpk "$@"
""",
    "kubectl": """#!/bin/bash
exec {python} -S {here}/fake_gke.py kubectl "$@"
""",
    # In the pods alone: the image has Python, the package and the run.
    "../pod/python": """#!/bin/bash
export PYTHONPATH={root}
if [ "$2" = scalerl_jax.main ] && [ -n "$FAKE_RUN" ]; then
  shift 2
  exec {python} "$FAKE_RUN" "$@"
fi
exec {python} "$@"
""",
}


class SmallCloud:
    def __init__(self, folder, bucket):
        self.folder, self.bucket = folder, bucket

    def script(self, **troubles):
        (self.folder / "script.json").write_text(json.dumps(troubles))

    def state(self):
        file = self.folder / "state.json"
        found = json.loads(file.read_text()) if file.exists() else {}
        return {name: each for name, each in found.items() if name != "made"}

    def calls(self, part):
        lines = (self.folder / "calls.txt").read_text().splitlines()
        return [line for line in lines if part in line]

    def variables(self):
        """Those with which commands find the cloud, and a run that is none."""
        return {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "FAKE_CLOUD": str(self.folder),
            "FAKE_RUN": str(HERE / "fake_run.py"),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(small_run.ROOT),
            "JAX_PLATFORMS": "cpu",
        }

    def launch(
        self, command, *more, flags=(), script=None, run=True, timeout=600, **changes
    ):
        """A finished `launch COMMAND`, or one of the scripts."""
        job = {
            "name": "run-1",
            "bucket": "gs://bucket/runs",
            "project": "p",
            "zone": "us-east5-b",
            "topology": "v6e:2x4",
            "config": "configs/tiny.py",
            "place": "queued_resource",
            "preflight": "skip",
            "poll-s": 0.2,
        } | changes
        flags = [
            *flags,
            *(f"--{name}={value}" for name, value in job.items() if value != ""),
        ]
        start = [sys.executable, "-m", "scalerl_jax.launch", command]
        if script:
            start = [str(small_run.ROOT / "launch" / script)]
            flags = [each for each in flags if not each.startswith("--place")]
        yes = ["--yes"] if command in ("run", "create") and not script else []
        fake = str(HERE / "fake_run.py") if run else ""
        return subprocess.run(
            [*start, *flags, *yes, *(["--", *more] if more else [])],
            cwd=self.folder / "laptop",
            env=os.environ | self.variables() | {"FAKE_RUN": fake},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )


@pytest.fixture
def cloud(tmp_path):
    bucket = small_bucket.empty()
    for name in ("bin", "laptop", "hosts", "pod"):
        (tmp_path / name).mkdir()
    (tmp_path / "laptop" / "configs").symlink_to(small_run.ROOT / "configs")
    for name, text in PROGRAMS.items():
        file = tmp_path / "bin" / name
        text = text.replace("{python}", sys.executable).replace("{here}", str(HERE))
        text = text.replace("{root}", str(small_run.ROOT))
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    found = SmallCloud(tmp_path, bucket)
    found.script()
    yield found
    hosts = tmp_path / "hosts"
    for host in [*hosts.glob("*/scalerl_jax/*/*.pid"), *hosts.glob("*/pod/run.pid")]:
        subprocess.run(["pkill", "-KILL", "--session", host.read_text().strip()])
