"""Plays xpk and kubectl, beside fake_gcloud.py: one cluster, JobSets, pods that run.

A pod is a folder and a process, started by the command of `xpk workload create` and,
as JobSet does it, again when it ends with a status that the command names.  script.json
says what goes wrong: "preempt" (numbers of rows after which the node is taken away),
"jobset" ("failed": pods that never come), "storage" (changes of its spec).
"""

import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from fake_gcloud import CLOUD, Failure, folder, rows, show, write

RUNS = "gs://bucket"
ALWAYS = {"--context", "--namespace"}
# Command -> its flags; a test compares them with those of the real clients.
FLAGS = {
    "xpk workload create": {
        *("--workload", "--project", "--zone", "--cluster", "--tpu-type"),
        *("--num-slices", "--docker-image", "--storage", "--max-restarts"),
        *("--restart-on-exit-codes", "--termination-grace-period-seconds"),
        "--command",
    },
    "xpk storage attach": {  # which errors name
        *("--type", "--project", "--zone", "--cluster", "--bucket", "--size"),
        *("--mount-point", "--auto-mount", "--readonly", "--mount-options"),
    },
    "kubectl get": {"--ignore-not-found", "--output"},
    "kubectl delete": {"--ignore-not-found", "--cascade", "--timeout"},
    "kubectl logs": {"--selector", "--tail", "--prefix", "--max-log-requests"},
}
POD = """cd {home}
mkdir -p pod && cd pod && echo $$ > run.pid
PATH={pod}:$PATH exec {command} >> run.log 2>&1 < /dev/null
"""


def main():
    words = sys.argv[1:]
    flags = dict((*each.partition("=")[::2],) for each in words if each[:2] == "--")
    names = [each for each in words if each[:2] != "--"]
    for command, known in FLAGS.items():
        length = len(command.split())
        if " ".join(names[:length]) == command:
            always = ALWAYS if names[0] == "kubectl" else set()
            if unknown := set(flags) - known - always:
                sys.exit(f"error: unknown flag: {unknown}")
            break
    else:
        sys.exit(f"error: unknown command {names}")
    if names[0] == "kubectl" and flags["--context"] != "gke_p_us-east5_c":
        sys.exit(f"error: context {flags['--context']!r} does not exist")
    with (CLOUD / "calls.txt").open("a") as calls:
        calls.write(" ".join(words).partition("--command=")[0] + "\n")
    script = json.loads((CLOUD / "script.json").read_text())
    file = CLOUD / "jobsets.json"
    state = json.loads(file.read_text()) if file.exists() else {}
    try:
        globals()[names[1]](names[length:], flags, state, script)
    finally:
        write(file, state)
        write(CLOUD / "script.json", script)


def workload(names, flags, state, script):
    name = flags["--workload"]
    if name in state:
        raise Failure(f"[XPK] {name} already exists, XPK will not create this workload")
    state[name] = {
        "command": flags["--command"],
        "topology": flags["--tpu-type"].partition("-")[2],
        "codes": flags["--restart-on-exit-codes"].split(","),
        "looks": 0,
        "rows": rows(name, RUNS),
    }


def get(names, flags, state, script):
    kind, name = names
    spec = {"mount_point": "gs://bucket", "readonly": False, "pv": "runs-pv"}
    spec |= script.get("storage", {})
    volume = {"csi": {"volumeHandle": "bucket"}}
    volume["mountOptions"] = script.get("mount options", ["rename-dir-limit=9"])
    things = {
        ("storages.xpk.x-k8s.io", "runs"): {"spec": spec},
        ("persistentvolume", "runs-pv"): {"spec": volume},
    }
    if kind == "jobset" and name in state:
        things[kind, name] = jobset(name, state[name], script)
    if (kind, name) in things:
        show(things[kind, name])


def jobset(name, job, script):
    """The JobSet at the next look: queued, then with pods; then as these end."""
    job["looks"] += 1
    status, suspended = {}, job["looks"] == 1
    if script.get("jobset") == "failed":
        del script["jobset"]
        job["status"] = 1
    if "status" not in job and not suspended:
        follow(name, job, script)
        ready = int(alive(name))
        status = {"replicatedJobsStatus": [{"name": "slice-job", "ready": ready}]}
    if "status" in job:
        done = "Failed" if job["status"] else "Completed"
        status = {"conditions": [{"type": done, "status": "True"}]}
    pod = {
        "containers": [{"command": ["bash", "-c", job["command"]]}],
        "nodeSelector": {"cloud.google.com/gke-tpu-topology": job["topology"]},
    }
    template = {"spec": {"template": {"spec": pod}}}
    created = datetime.datetime.now(datetime.UTC).isoformat()
    return {
        "metadata": {"name": name, "creationTimestamp": created},
        "spec": {"suspend": suspended, "replicatedJobs": [{"template": template}]},
        "status": status,
    }


def follow(name, job, script):
    """Start the pod, take its node away, or start it again."""
    limits = script.get("preempt") or []
    if alive(name):
        if limits and rows(name, RUNS) >= max(limits[0], job["rows"] + 1):
            script["preempt"] = limits[1:]
            os.kill(leader(name), signal.SIGTERM)
        return
    ended = folder(name) / "status"
    if ended.exists():
        status = ended.read_text().strip()
        ended.unlink()
        if status not in job["codes"]:
            job["status"] = int(status)
            return
    job["rows"] = rows(name, RUNS)
    start(name, job["command"])


def start(name, command):
    home = folder(name)
    (home / "pod").mkdir(parents=True, exist_ok=True)
    # With the pid of the pod before, which is gone, the next look would start another.
    (home / "pod/run.pid").unlink(missing_ok=True)
    told = POD.format(home=home, pod=CLOUD / "pod", command=command)
    waits = f"bash -c {shlex.quote(told)}; echo $? > {home}/status"
    subprocess.Popen(
        ["bash", "-c", waits],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not (home / "pod/run.pid").exists() or leader(name) is None:
        time.sleep(0.01)


def leader(name):
    """The supervisor's process id; None while the file is being written."""
    text = (folder(name) / "pod/run.pid").read_text().strip()
    return int(text) if text else None


def alive(name):
    if not (folder(name) / "pod/run.pid").exists():
        return False
    return Path(f"/proc/{leader(name)}/cmdline").exists()


def delete(names, flags, state, script):
    name = names[1]
    if state.pop(name, None) and alive(name):
        os.kill(leader(name), signal.SIGTERM)
        while alive(name):
            time.sleep(0.02)


def logs(names, flags, state, script):
    name = flags["--selector"].partition("=")[2]
    lines = (folder(name) / "pod/run.log").read_text().splitlines()
    for line in lines[-int(flags["--tail"]) :]:
        sys.stdout.write(f"[pod/{name}-slice-job-0-0/jax-tpu] {line}\n")


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        sys.stderr.write(f"{failure}\n")
        sys.exit(1)
