"""libtpu itself reads what a role is told, and counts workers as slices do.

It says so without a TPU: its log begins with the flags that the environment became.
"""

import json
import os
import re
import subprocess
import sys

import pytest
from tpu_compiler import NEEDS_COMPILER, ROOT

from scalerl_jax.machines.partition import split_slice
from scalerl_jax.machines.processes import deal
from scalerl_jax.machines.slices import parse_slice
from scalerl_jax.preflight.__main__ import ENVIRONMENT

pytestmark = NEEDS_COMPILER
# A machine of a whole slice, and of a job that it ran before.
INHERITED = {
    "TPU_ACCELERATOR_TYPE": "v5p-128",
    "TPU_PROCESS_BOUNDS": "2,2,4",
    "TPU_TOPOLOGY_ALT": "true",
    "TPU_TOPOLOGY_WRAP": "true,true,true",
    "TPU_VISIBLE_DEVICE_PATHS": "/dev/vfio/7",
    "TPU_WORKER_HOSTNAMES": "elsewhere",
}
START = (
    "import jax\ntry: jax.devices('tpu')\nexcept RuntimeError as error: print(error)"
)
WORKERS = """
import json, sys
from jax.experimental import topologies
chips = {}
options = json.loads(sys.argv[2])
found = topologies.get_topology_desc(
    platform="tpu", topology_name=sys.argv[1], num_slices=1, **options
)
for device in found.devices:
    chips.setdefault(device.process_index, []).append(list(device.coords)[::-1])
print(json.dumps([min(chips[worker])[::-1] for worker in sorted(chips)]))
"""


def run(script, *arguments, environment):
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    "text, asked, role, expected",
    [
        pytest.param(
            "v5p:4x4x4",
            (32, 8, 4),
            "learner 7",
            {
                "chips_per_host_bounds": "2,2,1",
                "host_bounds": "1,2,4",
                "hal_included_devs": "0,1,2,3",
                "slice_builder_worker_port": "8471",
                "slice_builder_worker_addresses": ",".join(
                    f"10.0.0.{worker}:8471" for worker in range(0, 16, 2)
                ),
            },
            id="a rank of eight hosts",
        ),
        pytest.param(
            "v5p:4x4x4",
            (32, 8, 4),
            "replica 0",
            {
                "chips_per_host_bounds": "2,2,1",
                "host_bounds": "1,1,1",
                "hal_included_devs": "0,1,2,3",
                "slice_builder_worker_port": "8471",
                "slice_builder_worker_addresses": "10.0.0.1:8471",
            },
            id="a replica of one host",
        ),
        pytest.param(
            "v5p:2x2x1",
            (2, 1, 2),
            "replica 0",
            {
                "chips_per_host_bounds": "1,2,1",
                "host_bounds": "1,1,1",
                "hal_included_devs": "2,3",
                "slice_builder_worker_port": "8473",
                "slice_builder_worker_addresses": "10.0.0.0:8473",
            },
            id="a replica of half a host",
        ),
    ],
)
def test_libtpu_reads_what_a_role_is_told(tmp_path, text, asked, role, expected):
    slice = parse_slice(text)
    names = ("learner_chips", "generators", "generator_chips")
    split = split_slice(slice, **dict(zip(names, asked, strict=True)))
    addresses = [f"10.0.0.{worker}" for worker in range(slice.num_hosts)]
    [process] = [
        each.process
        for host in deal(slice, split, addresses=addresses)
        for each in host.roles
        if role in (f"learner {each.rank}", f"replica {each.number}")
        and role.startswith(each.name)
    ]
    logging = {
        "JAX_PLATFORMS": "tpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_MIN_LOG_LEVEL": "0",
        "TPU_LOG_DIR": str(tmp_path),
    }
    run(START, environment=process.environment(dict(os.environ) | INHERITED) | logging)
    said = (tmp_path / "tpu_driver.INFO").read_text()
    flags = dict(re.findall(r"'--deepsea_(\w+)=(.*)'", said))
    expected |= {"wrap": "false,false,false", "twist": "false"}
    assert {name: flags.get(name) for name in expected} == expected
    assert "hal_included_devicepaths" not in flags


@pytest.mark.parametrize(
    "text, options",
    [
        pytest.param("v4:2x2x4", {"chip_config_name": "megacore"}, id="v4"),
        pytest.param("v5p:4x4x4", {"chip_config_name": "megacore"}, id="v5p"),
        pytest.param("v5p:4x8x8", {"chip_config_name": "megacore"}, id="two sides"),
        pytest.param("v5e:4x8", {"chips_per_host_bounds": (2, 2, 1)}, id="v5e"),
        pytest.param("v6e:4x4", {"chips_per_host_bounds": (2, 2, 1)}, id="v6e"),
    ],
)
def test_libtpu_counts_workers_alike(text, options):
    environment = dict(os.environ) | ENVIRONMENT
    found = run(WORKERS, text, json.dumps(options), environment=environment)
    corners = [list(corner) for corner in parse_slice(text).corners]
    assert json.loads(found.splitlines()[-1]) == corners
