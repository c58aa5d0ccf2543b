"""The environment of a cluster: its token, and who can read it."""

import logging
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from scalerl_jax.machines import ray_access

TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with a token of Ray's own, whose mode is that of a key."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    file = tmp_path / ".ray" / "auth_token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    return file


def read(path):
    return Path(path).read_text()


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_a_local_cluster_has_a_token_that_nobody_else_can_read(mask):
    given = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "x", "PATH": "/bin"}
    told, before = dict(given), os.umask(mask)
    try:
        with ray_access.prepared("local", environment=told):
            assert told["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in told
            file, place = told["RAY_AUTH_TOKEN_PATH"], told["RAY_TMPDIR"]
            assert mode_of(file) == 0o600 and mode_of(place) == 0o700
            token = read(file)
            assert len(bytes.fromhex(token)) == 32
            # Ray's own longest socket; a path of one has at most 107 characters.
            session = "ray/session_2026-11-25_15-09-35_718189_4194304"
            assert len(f"{place}/{session}/sockets/plasma_store") <= 107
    finally:
        os.umask(before)
    assert told == given and not os.path.exists(place)
    with ray_access.prepared("local", environment=told):
        assert read(told["RAY_AUTH_TOKEN_PATH"]) != token


def test_the_directory_of_a_killed_process_is_removed_by_the_next(monkeypatch):
    code = """
import os
from scalerl_jax.machines import ray_access
directory = ray_access.own_directory()
ray_access.write_token(directory.__enter__(), "0")
os._exit(9)
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("RAY_TMPDIR", short)
        assert subprocess.run([sys.executable, "-c", code]).returncode == 9
        (left,) = Path(short).iterdir()
        other = Path(short, "rl-ray-somebody")
        other.mkdir()
        with ray_access.own_directory() as place:
            ray_access.write_token(place, "0")
            with ray_access.own_directory() as another:  # of a process that lives
                assert set(Path(short).iterdir()) == {other, place, another}
        assert set(Path(short).iterdir()) == {other} and not left.exists()


def test_a_thread_that_a_run_leaves_behind_starts_no_other_cluster():
    pytest.importorskip("ray")
    code = """
from scalerl_jax.machines import ray_access
with ray_access.prepared("local"):
    import ray
try:
    ray.put(1)
except ray.exceptions.RayError:
    assert not ray.is_initialized()
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "refused\n", done.stderr


def test_what_further_processes_of_a_lost_role_raise_is_no_traceback():
    pytest.importorskip("ray")
    code = """
import types
from scalerl_jax.machines import ray_access
with ray_access.prepared("local"):
    from ray._private import worker

    error = types.SimpleNamespace(deserialize_objects=lambda *_: [ValueError("lost")])
    worker.Worker.raise_errors(error, [], [])
    print("prepared")
worker.Worker.raise_errors(error, [], [])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    before, _, after = done.stdout.partition("prepared\n")
    assert not before and "Unhandled error" in after, done.stdout


def test_sockets_find_room_where_files_lie_deep(tmp_path, monkeypatch):
    deep = tmp_path / ("a" * 60)
    deep.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(deep))
    with ray_access.own_directory() as place:
        assert place.parent.as_posix() == "/tmp"
    assert list(deep.iterdir()) == []


def test_another_cluster_needs_a_token_that_nobody_else_can_read(home, monkeypatch):
    def refused():
        with pytest.raises(ValueError) as error:
            with ray_access.prepared("auto"):
                raise AssertionError("it is not refused")
        return str(error.value)

    with ray_access.prepared("auto"):
        assert os.environ["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_MODE" not in os.environ
    for mode in (0o640, 0o604, 0o644, 0o660):
        home.chmod(mode)
        assert f"has mode {mode:04o}" in refused() and f"chmod 600 {home}" in refused()
    home.chmod(0o600)
    for wrong in (b"", b"\n", b"two words", b"\xff\xfe", b"0" * 5000):
        home.write_bytes(wrong)
        assert f"{home} holds no token" in refused()
    home.unlink()
    said = refused()
    assert f"there is no token in {home}" in said and "--ray_without_token" in said
    # The word of the environment does not open a cluster.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert refused() == said
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/dev/zero")
    assert "there is no token in /dev/zero: it is no file" in refused()
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with ray_access.prepared("auto"):
        assert os.environ["RAY_AUTH_MODE"] == "token"


def test_a_cluster_without_a_token_is_warned_of(home, caplog):
    with caplog.at_level(logging.WARNING):
        with ray_access.prepared("10.0.0.4:6379", without_token=True):
            assert os.environ["RAY_AUTH_MODE"] == "disabled"
    (row,) = caplog.records
    assert "--ray_without_token" in row.message and "10.0.0.4:6379" in row.message
