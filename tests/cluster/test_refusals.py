"""What a cluster is refused for, before anything is compiled."""

import shutil
from pathlib import Path

import pytest
import small_run

pytest.importorskip("ray")
from scalerl_jax import wiring
from scalerl_jax.cluster.run import fit_cluster
from scalerl_jax.cluster.session import (
    Cluster,
    _code_digest,
    check_versions,
    connect,
    versions,
)


def fit(changes, cluster=None):
    config = small_run.make_config(changes)
    arch = wiring.make_architecture(config)
    return fit_cluster(config, arch, cluster or Cluster("here", "cpu"))[0]


@pytest.mark.parametrize(
    "name", ["jax", "jaxlib", "scalerl_jax", "code", "ray", "Python"]
)
def test_a_process_of_another_version_is_refused_by_name(name):
    check_versions(versions(), where="replica 1 on host b")
    theirs = versions() | {name: "0.0.1"}
    with pytest.raises(ValueError, match=rf"replica 1 on host b has {name} 0\.0\.1 "):
        check_versions(theirs, where="replica 1 on host b")


def test_the_same_code_elsewhere_has_the_same_digest_and_other_code_another(tmp_path):
    package = small_run.ROOT / "scalerl_jax"
    skipped = shutil.ignore_patterns("__pycache__")

    def digest(name, change):
        copy = tmp_path / name
        shutil.copytree(package, copy, ignore=skipped)
        change(copy)
        return _code_digest(copy)

    def edit(copy: Path):
        with (copy / "algo" / "losses.py").open("a") as file:
            file.write("\n")

    assert digest("same", lambda copy: None) == versions()["code"]
    changes = [edit, lambda copy: (copy / "types.py").rename(copy / "kinds.py")]
    others = {digest(f"other-{n}", change) for n, change in enumerate(changes)}
    assert len(others | {versions()["code"]}) == 3


def test_on_cpus_there_are_as_many_devices_as_are_asked_for():
    config = fit({"mesh.fsdp": 0, "mesh.processes": 2, "generators.count": 3})
    assert config.mesh.fsdp == 2
    assert config.generators.count == 3
    assert config.generators.placement == "apart"


@pytest.mark.parametrize(
    "changes, words",
    [
        pytest.param(
            {"mesh.fsdp": 2, "mesh.processes": 3},
            "mesh.processes = 3",
            id="ranks that are not even",
        ),
        pytest.param(
            {"generators.placement": "shared"},
            "generators.placement = 'shared'",
            id="shared devices",
        ),
    ],
)
def test_what_does_not_fall_evenly_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        fit(changes)


@pytest.mark.parametrize("address", ["here", "host:port", "127.0.0.1:1"])
def test_an_address_that_is_none_is_refused_at_once(address):
    with pytest.raises(ValueError, match=f"--ray={address} "):
        connect(address)


def test_a_local_cluster_that_does_not_start_is_told_as_such(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    monkeypatch.setenv("RAY_worker_niceness", "0")
    with pytest.raises(RuntimeError, match="^--ray=local: Ray .* does not start on"):
        connect("local")
