"""Files for other clients, read by the clients themselves where they are installed.

Manifests are held against the schemas of their kinds in third_party/, with the
strictness of `kubectl apply --validate=strict`: a name that a schema lacks is refused.
Rules written in CEL (x-kubernetes-validations) are not evaluated.
"""

import dataclasses
import gzip
import json
import re
import shlex
import shutil
import subprocess

import jsonschema
import pytest
import small_run
import yaml

from scalerl_jax.launch import gke, hosts
from scalerl_jax.launch.job import make_job
from scalerl_jax.launch.supervisor import PREEMPTED
from scalerl_jax.machines.slices import generation_of, parse_slice

LAUNCH = small_run.ROOT / "launch"
GKE = make_job(
    {
        "place": "gke",
        "name": "run-1",
        "project": "p",
        "zone": "us-east5-b",
        "cluster": "c",
        "image": "image",
        "storage": "runs",
        "bucket": "gs://bucket",
        "topology": "v6e:4x4",
        "config": "configs/8b.py",
    }
)
DATA = "--config.data.tasks=('a', 'b')"


RAY = {"NAME": "run-1", "IMAGE": "image", "BUCKET": "bucket", "ACCOUNT": "account"}
RAY |= {"CONFIG": "configs/8b.py"}


def refusals(manifest, kind):
    """What the schema of a kind has against a manifest."""
    file = small_run.ROOT / f"third_party/kubernetes_schemas/{kind}.json.gz"
    schema = closed(json.loads(gzip.decompress(file.read_bytes())))
    validator = jsonschema.Draft202012Validator(schema)
    return [
        f"{error.json_path}: {error.message}"
        for error in validator.iter_errors(manifest)
    ]


def closed(schema):
    """The schema, with no names but those that it lists; lists and maps of them too."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: closed(value) for name, value in schema.items()}
    # `properties` may also be the name of a field: then it is no map of schemas.
    is_object = schema.get("type") == "object" and "properties" in schema
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    return schema


def ray_job():
    text = (LAUNCH / "gke_ray.yaml").read_text()  # envsubst leaves $(NODE_IP) alone
    return yaml.safe_load(re.sub(r"\$\{(\w+)\}", lambda name: RAY[name[1]], text))


def test_the_ray_job_is_one():
    assert not refusals(ray_job(), "rayjob")


def test_a_mounted_bucket_lets_a_checkpoint_be_renamed():
    """gcsfuse renames no directory with files without being told up to which size."""
    wanted = ",".join(hosts.MOUNT_OPTIONS)
    assert "rename-dir-limit=200000" in wanted
    spec = ray_job()["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (volume,) = spec["volumes"]
    assert volume["csi"]["volumeAttributes"]["mountOptions"] == wanted
    assert f"--mount-options={wanted}" in gke.attach(GKE)
    slice = make_job(
        vars(GKE) | {"place": "queued_resource", "bucket": "gs://bucket/x"}
    )
    script = hosts.start_script(slice, "0" * 64, ["python"], extras="tpu")
    assert " ".join(f"--{each}" for each in hosts.MOUNT_OPTIONS) in script


def test_the_storage_that_is_asked_for_has_every_flag_that_xpk_requires():
    file = small_run.ROOT / "tests/launch/client_flags.json"
    known = json.loads(file.read_text())["flags"]["xpk storage attach"]
    given = {each.partition("=")[0] for each in gke.attach(GKE)[4:]}
    required = {"--type", "--cluster", "--auto-mount", "--mount-point", "--readonly"}
    assert required | {"--size"} <= given <= set(known)


@pytest.mark.parametrize(
    "topology, pods",
    [("v6e:1x1", 1), ("v6e:4x4", 4), ("2*v6e:4x4", 8), ("3*v6e:1x1", 3)],
)
def test_logs_are_asked_of_the_pods_of_all_slices(topology, pods):
    job = dataclasses.replace(GKE, topology=topology)
    assert gke.logs(job, "context", 50)[-1] == f"--max-log-requests={pods}"


@pytest.mark.parametrize(
    "names, value, words",
    [
        pytest.param(["entrypont"], "x", "'entrypont' was unexpected", id="a name"),
        pytest.param(["backoffLimit"], "0", "is not of type 'integer'", id="a type"),
        pytest.param(
            ["rayClusterSpec", "headGroupSpec", "template", "spec", "container"],
            [],
            "'container' was unexpected",
            id="a name of a pod",
        ),
    ],
)
def test_a_wrong_ray_job_is_refused(names, value, words):
    job = ray_job()
    part = job["spec"]
    for name in names[:-1]:
        part = part[name]
    part[names[-1]] = value
    (line,) = refusals(job, "rayjob")
    assert words in line


def test_the_ray_job_has_the_hosts_and_the_chips_of_its_slice():
    cluster = ray_job()["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    selector = pod["nodeSelector"]
    kind = generation_of(selector["cloud.google.com/gke-tpu-accelerator"])
    topology = selector["cloud.google.com/gke-tpu-topology"]
    slice = parse_slice(f"{kind.name}:{topology}")
    assert group["numOfHosts"] == slice.num_hosts
    limits = container["resources"]["limits"]
    assert int(limits["google.com/tpu"]) == slice.chips_per_host
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert "google.com/tpu" not in head["resources"]["limits"]
    pinned = (small_run.ROOT / "constraints.txt").read_text()
    assert f"\nray=={cluster['rayVersion']}\n" in pinned
    assert f"WORKDIR {head['workingDir']}\n" in (LAUNCH / "Dockerfile").read_text()


def test_the_file_of_the_ray_job_names_what_it_needs_makes_and_costs():
    text = (LAUNCH / "gke_ray.yaml").read_text()
    assert set(re.findall(r"\$\{(\w+)\}", text)) == set(RAY)
    (exported,) = re.findall(r"# +export (.+)", text)
    assert {each.partition("=")[0] for each in exported.split()} == set(RAY)
    assert all(f"# {word}:" in text for word in ("Makes", "Costs", "Stopped"))


def without_empty(value):
    """A manifest as the API takes it: a name without a value is left out."""
    if isinstance(value, dict):
        kept = {name: without_empty(each) for name, each in value.items()}
        return {name: each for name, each in kept.items() if each is not None}
    return [without_empty(each) for each in value] if type(value) is list else value


@pytest.mark.skipif(shutil.which("xpk") is None, reason="xpk is not installed")
def test_xpk_makes_a_job_set_that_restarts_on_preemptions_alone(tmp_path):
    manifest = tmp_path / "job.yaml"
    dry = ["--dry-run", "--skip-validation", f"--output-manifest-file={manifest}"]
    command = gke.create(GKE, [DATA])
    command.remove("--storage=runs")  # of a cluster that is not there
    done = subprocess.run(
        [*command, *dry],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = yaml.safe_load(manifest.read_text())
    (named_later,) = refusals(without_empty(found), "jobset")  # by JobSet's webhook
    assert named_later.endswith("Policy.rules[0]: 'name' is a required property")
    assert (found["kind"], found["metadata"]["name"]) == ("JobSet", "run-1")
    assert found["spec"]["failurePolicy"]["maxRestarts"] == 50
    (job,) = found["spec"]["replicatedJobs"]
    assert (job["replicas"], job["template"]["spec"]["completions"]) == (1, 4)
    (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    restarted = rule["onExitCodes"]["values"]
    assert rule["onExitCodes"]["operator"] == "NotIn"
    assert PREEMPTED in restarted and not {0, 1, 2} & set(restarted)
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 60
    (container,) = pod["containers"]
    told = container["command"][-1]
    supervise = "launch supervise --workdir=/mnt/scalerl_jax/run-1 --failures=5 "
    assert f"{supervise}--grace-s=55 -- " in told
    assert f"--ray=slice {shlex.quote(DATA)}" in told


def sky_refusals(task):
    """What SkyPilot's schemas have against a task."""
    file = small_run.ROOT / "third_party/skypilot_schemas/schemas.json.gz"
    schemas = json.loads(gzip.decompress(file.read_bytes()))
    parts = [(task, schemas["task"]), (task["resources"], schemas["resources"])]
    return [
        error.message
        for part, schema in parts
        for error in jsonschema.Draft7Validator(schema).iter_errors(part)
    ]


def sky_task():
    return yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())


def test_skypilot_knows_every_name():
    assert not sky_refusals(sky_task())
    (line,) = sky_refusals(sky_task() | {"setupp": "x"})
    assert "'setupp'" in line
    task = sky_task()
    task["resources"]["use_spott"] = True
    assert "use_spott" in " ".join(sky_refusals(task))


def test_the_image_has_what_its_file_copies():
    text = (LAUNCH / "Dockerfile").read_text()
    names = [
        name
        for line in re.findall(r"^COPY (.+)$", text, re.M)
        for name in line.split()[:-1]
    ]
    assert {"setup.py", "constraints.txt", "README.md", "configs"} <= set(names)
    assert all((small_run.ROOT / name).exists() for name in names)
    (extras,) = re.findall(r"ARG EXTRAS=(\S+)", text)
    setup = (small_run.ROOT / "setup.py").read_text()
    assert all(f'"{extra}":' in setup for extra in extras.split(","))
