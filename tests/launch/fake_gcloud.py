"""Plays gcloud: queued resources, TPU VMs, ssh, buckets; a state machine in a folder.

FAKE_CLOUD names the folder; fake_gke.py plays xpk and kubectl in it.  Its script.json
says what goes wrong: "create" (a list of "quota", "no quota", "stock-out", "failed";
each for one creation), "ssh" (connections that fail), "preempt" (numbers of rows in a
run's metrics.jsonl, of which the machine has written one), "stuck" (slices that are
never removed), "unheard" (states of slices, by name, at every look), "types",
"location", "cluster" and "pools" (where the one of GKE is, and its topologies).
A host is a folder, in which scripts run with programs of their own; buckets are those
of STORAGE_EMULATOR_HOST.
"""

import datetime
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

CLOUD = Path(os.environ.get("FAKE_CLOUD", "."))
ALWAYS = {"--project", "--quiet", "--format"}
NODE = {"--zone", "--accelerator-type", "--type", "--topology", "--spot", "--reserved"}
NODE |= {"--service-account", "--network", "--subnetwork", "--internal-ips", "--labels"}
# Command -> its flags; a test compares them with those of the real gcloud.
FLAGS = {
    "compute tpus queued-resources create": NODE | {"--node-id", "--runtime-version"},
    "compute tpus queued-resources describe": {"--zone"},
    "compute tpus queued-resources delete": {"--zone", "--force"},
    "compute tpus tpu-vm create": NODE | {"--version"},
    "compute tpus tpu-vm describe": {"--zone"},
    "compute tpus tpu-vm delete": {"--zone"},
    "compute tpus tpu-vm ssh": {"--zone", "--worker", "--command", "--internal-ip"},
    "compute tpus accelerator-types list": {"--zone"},
    "container clusters list": {"--filter"},
    "container clusters get-credentials": {"--location"},
    "compute instances create": {
        *("--zone", "--machine-type", "--image-family", "--image-project", "--labels"),
        *("--boot-disk-size", "--scopes", "--service-account", "--network", "--subnet"),
        "--no-address",
    },
    "compute instances describe": {"--zone"},
    "compute instances delete": {"--zone"},
    "compute ssh": {"--zone", "--command", "--internal-ip"},
    "storage buckets describe": set(),
    "storage objects describe": set(),
    "storage cat": set(),
    "storage cp": set(),
    "storage ls": set(),
    "storage rsync": {"--recursive", "--exclude"},
}
RISES = {
    "ACCEPTED": "WAITING_FOR_RESOURCES",
    "WAITING_FOR_RESOURCES": "PROVISIONING",
    "PROVISIONING": "ACTIVE",
    "CREATING": "READY",
    "STAGING": "RUNNING",
}
GRACE_S = 30.0
# Once the host has ended: a slice, and a machine of its own.
GONE = {"SUSPENDING": "SUSPENDED", "STOPPING": "PREEMPTED"}


class Failure(Exception):
    """What gcloud says on stderr; its status is 1."""


def main():
    command, names, flags = parse(sys.argv[1:])
    with (CLOUD / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = CLOUD / "state.json"
        state = json.loads(file.read_text()) if file.exists() else {}
        script = json.loads((CLOUD / "script.json").read_text())
        with (CLOUD / "calls.txt").open("a") as calls:
            calls.write(" ".join(sys.argv[1:]).partition("--command=")[0] + "\n")
        try:
            action = Cloud(state, script, command).action(names, flags)
        finally:
            write(file, state)
            write(CLOUD / "script.json", script)
    action()


def write(file, values):
    """A run reads these files at any time."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(values))
    new.replace(file)


def parse(words):
    names = [word for word in words if not word.startswith("--")]
    flags = dict(
        (*word.partition("=")[::2],) for word in words if word.startswith("--")
    )
    for command, known in FLAGS.items():
        length = len(command.split())
        if " ".join(names[:length]) == command:
            if unknown := set(flags) - known - ALWAYS:
                sys.stderr.write(f"ERROR: unrecognized arguments: {unknown}\n")
                sys.exit(2)
            return command, names[length:], flags
    sys.stderr.write(f"ERROR: (gcloud) Invalid choice: {names}\n")
    sys.exit(2)


class Cloud:
    def __init__(self, state, script, command):
        self.state, self.script, self.command = state, script, command

    def action(self, names, flags):
        """What is left to do once the state is written; it may take long."""
        kind, verb = self.command.split()[-2:]
        if self.command.startswith("storage"):
            described = self.bucket if kind == "buckets" else object_
            verbs = {"describe": described, "cat": cat, "ls": ls, "cp": cp}
            verbs["rsync"] = rsync
            return lambda: verbs[verb](*names)
        if kind == "clusters":
            if verb == "get-credentials":
                return lambda: None
            return lambda: show(clusters(self.script))
        if kind == "accelerator-types":
            types = self.script.get("types", ["v6e-8", "v6e-16", "v5p-8"])
            return lambda: show([{"name": f"x/{each}", "type": each} for each in types])
        return getattr(self, verb)(names[0], kind, flags)

    def create(self, name, kind, flags):
        if "--topology" in flags:
            raise_(f"INVALID_ARGUMENT: {flags['--topology']}")
        if name in self.state:
            raise_(f"ALREADY_EXISTS: Resource 'projects/p/{name}' already exists.")
        slices = kind != "instances"
        troubles = (slices and self.script.get("create")) or [""]
        trouble = troubles[0]
        if slices:
            self.script["create"] = troubles[1:]
        if trouble == "no quota":
            raise_(
                "RESOURCE_EXHAUSTED: Quota limit 'TPUV6EPreemptiblePerProjectPerZone"
                "ForTPUAPI' has been exceeded. Limit: 0 in region us-east5."
            )
        if trouble == "quota":
            raise_(
                "RESOURCE_EXHAUSTED: Quota limit 'TPUV6EPerProjectPerZoneForTPUAPI' "
                "has been exceeded. Limit: 16 in region us-east5."
            )
        if trouble == "stock-out":
            raise_(
                'There is no more capacity in the zone "us-east5-b"; you can try in '
                "another zone where Cloud TPU Nodes are offered"
            )
        shutil.rmtree(folder(name), ignore_errors=True)  # of the machine before
        first = {"tpu-vm": "CREATING", "instances": "STAGING"}.get(kind, "ACCEPTED")
        self.state["made"] = self.state.get("made", 0) + 1
        self.state[name] = {
            "state": "FAILED" if trouble == "failed" else first,
            "type": flags.get("--accelerator-type", ""),
            "labels": dict([flags["--labels"].split("=")]),
            "host": name,
            "rows": rows(run_of(name)),
        }
        return lambda: None

    def describe(self, name, kind, flags):
        machine = self.find(name)
        self.rise(machine, name)
        machine["state"] = self.script.get("unheard", {}).get(name, machine["state"])
        now = datetime.datetime.now(datetime.UTC).isoformat()
        node = {"acceleratorType": machine["type"], "labels": machine["labels"]}
        if kind == "instances":
            said = {"status": machine["state"], "labels": machine["labels"]}
            said |= {"networkInterfaces": [{"networkIP": "10.0.0.2"}]}
        elif kind == "tpu-vm":
            said = node | {"state": machine["state"], "createTime": now}
        else:
            spec = [{"nodeId": name, "node": node}]
            said = {"state": {"state": machine["state"]}, "createTime": now}
            said |= {"name": name, "tpu": {"nodeSpec": spec}}
        return lambda: show(said)

    def rise(self, machine, name):
        """A machine's state at the next look."""
        state, host = machine["state"], machine["host"]
        if state in RISES:
            machine["state"] = RISES[state]
        elif state in ("ACTIVE", "READY"):
            limits = self.script.get("preempt") or []
            if limits and rows(run_of(name)) >= max(limits[0], machine["rows"] + 1):
                self.script["preempt"] = limits[1:]
                terminate(host, signal.SIGTERM)
                going = "STOPPING" if state == "READY" else "SUSPENDING"
                machine |= {"state": going, "since": time.time()}
        elif state in GONE:
            if not alive(host) or time.time() - machine["since"] > GRACE_S:
                terminate(host, signal.SIGKILL)
                machine["state"] = GONE[state]

    def delete(self, name, kind, flags):
        machine = self.find(name)
        if name in self.script.get("stuck", []):
            machine["state"] = "DELETING"
            return lambda: None
        if kind == "queued-resources" and "--force" not in flags:
            raise_("FAILED_PRECONDITION: nodes exist, use --force")
        terminate(machine["host"], signal.SIGKILL)
        del self.state[name]
        return lambda: None

    def ssh(self, name, kind, flags):
        machine = self.find(name)
        if self.script.get("ssh", 0) > 0:
            self.script["ssh"] -= 1
            raise_("[/usr/bin/ssh] exited with return code [255].")
        if machine["state"] not in ("ACTIVE", "READY", "RUNNING"):
            raise_(f"FAILED_PRECONDITION: {name} is not in state READY")
        return lambda: on_host(machine["host"], flags["--command"])

    def find(self, name):
        if name not in self.state:
            raise_(
                f"NOT_FOUND: Resource 'projects/p/queuedResources/{name}' was not found"
            )
        return self.state[name]

    def bucket(self, url):
        name = url.removeprefix("gs://")
        fetch(f"/storage/v1/b/{name}", f"gs://{name} not found: 404.")
        show({"name": name, "location": self.script.get("location", "US-EAST5")})


def clusters(script):
    """The project's only one, with a node pool for each topology."""
    pools = [
        {
            "config": {"machineType": "ct6e-standard-4t"},
            "placementPolicy": {"tpuTopology": topology},
        }
        for topology in script.get("pools", ["2x4"])
    ]
    where = script.get("cluster", "us-east5")
    found = {"name": "c", "location": where, "nodePools": pools}
    return [found] if where else []


def raise_(text):
    raise Failure(f"ERROR: (gcloud) {text}")


def show(value):
    sys.stdout.write(json.dumps(value))


# -- hosts ----------------------------------------------------------------------------


def folder(host):
    return CLOUD / "hosts" / host


def on_host(host, script):
    home = folder(host)
    home.mkdir(parents=True, exist_ok=True)
    path = f"{CLOUD / 'bin'}:{os.environ['PATH']}"
    environment = os.environ | {"HOME": str(home), "PATH": path}
    environment.pop("PYTHONPATH", None)  # the host has the code that was sent to it
    done = subprocess.run(
        ["bash", "-c", script], cwd=home, env=environment, stdin=subprocess.DEVNULL
    )
    sys.exit(done.returncode)


def numbers(host):
    """Supervisors of the host, and what they have started."""
    found = []
    for file in folder(host).glob("scalerl_jax/*/*.pid"):
        number = int(file.read_text())
        listed = subprocess.run(
            ["ps", "-o", "stat=,pid=", "--sid", str(number)],
            capture_output=True,
            text=True,
        )
        lines = map(str.split, listed.stdout.splitlines())
        members = [int(pid) for state, pid in lines if state[0] != "Z"]
        found.append((number, members))
    return found


def alive(host):
    return any(members for _, members in numbers(host))


def terminate(host, number):
    """SIGTERM to each supervisor, as systemd does it; SIGKILL to all."""
    for leader, members in numbers(host):
        for each in members if number == signal.SIGKILL else [leader]:
            try:
                os.kill(each, number)
            except ProcessLookupError:
                pass


# -- buckets --------------------------------------------------------------------------


def fetch(path, missing, *, data=None, method="GET"):
    import urllib.error  # half of the time of a call that needs it not
    import urllib.request

    request = urllib.request.Request(
        os.environ["STORAGE_EMULATOR_HOST"] + path, data=data, method=method
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise Failure(f"ERROR: (gcloud.storage) {missing}") from error
        raise Failure(
            f"ERROR: (gcloud.storage) HTTPError {error.code}: {error.read().decode()}"
        ) from error


def parts(url):
    bucket, _, name = url.removeprefix("gs://").partition("/")
    return bucket, urllib.parse.quote(name, safe="")


def get(url):
    bucket, name = parts(url)
    missing = f"The following URLs matched no objects or files: {url}"
    return fetch(f"/storage/v1/b/{bucket}/o/{name}?alt=media", missing)


def object_(url):
    bucket, name = parts(url)
    missing = f"The following URLs matched no objects or files: {url}"
    found = json.loads(fetch(f"/storage/v1/b/{bucket}/o/{name}", missing))
    # As gcloud names and writes it.
    updated = datetime.datetime.fromisoformat(found["updated"])
    show({"name": found["name"], "update_time": f"{updated:%Y-%m-%dT%H:%M:%S%z}"})


def cat(url):
    sys.stdout.buffer.write(get(url))


def ls(url):
    if not url.endswith("/**"):
        get(url)
        sys.stdout.write(f"{url}\n")
        return
    bucket, _ = parts(url)
    names = list(listed(url.removesuffix("/**")))
    if not names:
        raise Failure("ERROR: (gcloud.storage.ls) One or more URLs matched no objects.")
    for name in names:
        sys.stdout.write(f"gs://{bucket}/{name}\n")


def cp(source, target):
    if source.startswith("gs://"):
        Path(target).write_bytes(get(source))
        return
    bucket, name = parts(target)
    path = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}"
    fetch(
        path,
        f"gs://{bucket} not found: 404.",
        data=Path(source).read_bytes(),
        method="POST",
    )


def listed(url):
    bucket, prefix = parts(url + "/")
    path, token = f"/storage/v1/b/{bucket}/o?prefix={prefix}", ""
    while True:
        page = json.loads(fetch(path + token, "no bucket"))
        yield from (each["name"] for each in page["items"])
        if "nextPageToken" not in page:
            return
        token = f"&pageToken={urllib.parse.quote(page['nextPageToken'], safe='')}"


def rsync(source, target):
    bucket, prefix = source.removeprefix("gs://").split("/", 1)
    for name in listed(source):
        rest = name.removeprefix(f"{prefix}/")
        if not rest.startswith(("checkpoints/", ".")):
            (Path(target) / rest).parent.mkdir(parents=True, exist_ok=True)
            (Path(target) / rest).write_bytes(get(f"gs://{bucket}/{name}"))


def run_of(name):
    """The run of a machine: a slice of several has a number after it."""
    run, _, number = name.rpartition("-")
    return run if "-" in run and (number.isdecimal() or number == "head") else name


def rows(name, runs="gs://bucket/runs"):
    try:
        return get(f"{runs}/{name}/metrics.jsonl").count(b"\n")
    except Failure:
        return 0


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        sys.stderr.write(f"{failure}\n")
        sys.exit(1)
