"""A TPU that is not there is not asked for, and one that is there always is."""

import importlib.util
import os
import subprocess
import sys

import pytest

from scalerl_jax.machines.platforms import has_tpu, platforms

LAPTOP = {
    "dev/vfio/vfio": "",
    "sys/bus/pci/devices/0000:00:02.0/vendor": "0x8086\n",
    "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
}


def machine(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    "environment, files, expected",
    [
        pytest.param({}, {}, False, id="no files at all"),
        pytest.param({}, LAPTOP, False, id="Intel, NVIDIA and VFIO without a device"),
        pytest.param({}, LAPTOP | {"dev/accel0": ""}, True, id="a TPU up to v4"),
        pytest.param({}, LAPTOP | {"dev/vfio/0": ""}, True, id="a TPU from v5e on"),
        pytest.param({}, {"dev/accel/accel0": ""}, False, id="an NPU"),
        pytest.param(
            {},
            LAPTOP | {"sys/bus/pci/devices/0000:05:00.0/vendor": "0x1ae0\n"},
            True,
            id="Google's on the bus",
        ),
        pytest.param({"TPU_WORKER_HOSTNAMES": "a"}, LAPTOP, True, id="GKE says so"),
        pytest.param({"JAX_FORCE_TPU_INIT": "1"}, LAPTOP, True, id="the user says so"),
        # JAX sets it itself, for the processes that this one starts.
        pytest.param({"TPU_SKIP_MDS_QUERY": "1"}, LAPTOP, False, id="JAX found none"),
    ],
)
def test_a_tpu_is_known_without_jax(tmp_path, environment, files, expected):
    assert has_tpu(environment, machine(tmp_path, files)) is expected


@pytest.fixture
def libtpu(tmp_path, monkeypatch):
    """A package of this name to be found, as the extra [tpu] brings it."""
    packages = tmp_path / "packages"
    machine(packages, {"libtpu/__init__.py": ""})
    monkeypatch.syspath_prepend(packages)
    return packages


def test_the_cpu_is_named_where_libtpu_would_find_nothing(tmp_path, libtpu):
    laptop = machine(tmp_path / "laptop", LAPTOP)
    assert platforms({}, laptop) == "cpu"
    assert platforms({"JAX_PLATFORMS": ""}, laptop) is None  # the user's own
    assert platforms({"JAX_PLATFORMS": "tpu"}, laptop) is None
    assert platforms({}, machine(tmp_path / "vm", {"dev/accel0": ""})) is None
    machine(libtpu, {"jax_plugins/cuda/__init__.py": ""})
    importlib.invalidate_caches()
    assert platforms({}, laptop) is None  # JAX looks for its GPU


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed"
)
def test_without_libtpu_nothing_is_chosen(tmp_path):
    assert platforms({}, machine(tmp_path, LAPTOP)) is None


@pytest.mark.parametrize("own", [None, "cpu,tpu"])
def test_a_process_that_imports_the_package_says_it_to_jax(libtpu, own):
    """Of a machine without a TPU, which those of the tests are."""
    if has_tpu(os.environ):
        pytest.skip("this machine has a TPU")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path])}
    environment.pop("JAX_PLATFORMS", None)
    if own:
        environment["JAX_PLATFORMS"] = own
    code = "import os, scalerl_jax; print(os.environ['JAX_PLATFORMS'])"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert found.stdout.strip() == (own or "cpu"), found.stderr
