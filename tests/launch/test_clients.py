"""Files for other clients, read by the clients themselves where they are installed.

Manifests are held against the schemas of their kinds in third_party/, with the
strictness of `kubectl apply --validate=strict`: a name that a schema lacks is refused.
Rules written in CEL (x-kubernetes-validations) are not evaluated.
"""

import gzip
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import small_run
import yaml

from scalerl_jax.launch.supervisor import PREEMPTED
from scalerl_jax.pod.slices import generation_of, parse_slice

LAUNCH = small_run.ROOT / "launch"
JOB = {
    "NAME": "run-1",
    "PROJECT": "p",
    "ZONE": "us-east5-b",
    "CLUSTER": "c",
    "IMAGE": "image",
    "STORAGE": "runs",
    "TPU_TYPE": "v6e-16",
    "WORKDIR": "/data/run-1",
    "CONFIG": "configs/8b.py",
}


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


def without_storage(path):
    """The script's text; storages are asked of a cluster, which is not there."""
    text = (LAUNCH / "gke_xpk.sh").read_text()
    path.write_text(text.replace('--storage="$STORAGE" ', ""))
    return path


@pytest.mark.skipif(shutil.which("xpk") is None, reason="xpk is not installed")
def test_xpk_makes_a_job_set_that_restarts_on_preemptions_alone(tmp_path):
    manifest = tmp_path / "job.yaml"
    dry = ["--dry-run", "--skip-validation", f"--output-manifest-file={manifest}"]
    done = subprocess.run(
        ["bash", without_storage(tmp_path / "gke.sh"), *dry],
        env=os.environ | JOB,
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
    assert "launch supervise --workdir=/data/run-1 -- " in container["command"][-1]


@pytest.mark.skipif(shutil.which("xpk") is None, reason="xpk is not installed")
def test_xpk_knows_every_flag():
    done = subprocess.run(
        ["xpk", "workload", "create", "--help"], capture_output=True, text=True
    )
    used = re.findall(r" (--[a-z-]+)=", (LAUNCH / "gke_xpk.sh").read_text())
    known = set(re.findall(r"--[a-z-]+", done.stdout))
    ours = {"--workdir", "--config", "--ray"}
    delete = {"--workload"}
    assert set(used) - ours <= known | delete


@pytest.mark.parametrize("name", JOB)
def test_a_missing_name_ends_the_script_before_it_calls_xpk(name):
    environment = {key: value for key, value in JOB.items() if key != name}
    done = subprocess.run(
        ["/bin/bash", LAUNCH / "gke_xpk.sh"], env=environment, capture_output=True
    )
    assert done.returncode == 1 and name.encode() in done.stderr


@pytest.mark.skipif(shutil.which("sky") is None, reason="SkyPilot is not installed")
def test_skypilot_knows_every_name():
    first = Path(shutil.which("sky")).read_text().splitlines()[0]
    code = f"""
import jsonschema, yaml
from sky.utils import schemas
values = yaml.safe_load(open({str(LAUNCH / "skypilot.yaml")!r}))
jsonschema.validate(values, schemas.get_task_schema())
jsonschema.validate(values["resources"], schemas.get_resources_schema())
"""
    python = first.removeprefix("#!").strip()
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
