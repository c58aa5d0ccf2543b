import os
import re
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
import small_bucket

from scalerl_jax.formats import remote
from scalerl_jax.formats.reading import is_remote, local_file

pytestmark = small_bucket.NEEDS_EXTRA


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    return small_bucket.empty()


def opened(url):
    return remote.open_path(url, setting="--workdir=")


def test_only_a_path_with_a_scheme_is_in_no_file_system_here():
    assert is_remote("gs://bucket/run")
    assert is_remote("s3://bucket/run")
    assert not is_remote("runs/gs:/x")
    assert not is_remote(Path("/gs/x"))


def test_objects_are_written_read_listed_and_removed(bucket):
    path = opened("gs://bucket/run/")
    remote.write(path / "a", b"1")
    remote.write(path / "deep" / "b", b"22")
    remote.write(opened("gs://bucket/runner"), b"of another")
    assert bucket.names() == ["run/a", "run/deep/b", "runner"]
    found = remote.entries(path)
    assert {name: each["size"] for name, each in found.items()} == {"a": 1, "deep/b": 2}
    assert [remote.read(path / name) for name in ("a", "b")] == [b"1", None]
    assert list(remote.entries(path / "a")) == [""]
    remote.remove(path)
    remote.remove(path)
    assert bucket.names() == ["runner"]


def test_an_object_that_is_there_is_not_made_again(bucket):
    path = opened("gs://bucket/run/a")
    remote.write(path, b"first", only_new=True)
    with pytest.raises(FileExistsError):
        remote.write(path, b"second", only_new=True)
    assert remote.read(path) == b"first"


def test_only_the_generation_that_was_seen_is_removed(bucket):
    path = opened("gs://bucket/run/a")
    remote.write(path, b"first")
    seen = remote.entries(path)[""]["generation"]
    remote.write(path, b"second")
    remote.remove_generation(path, seen)
    assert remote.read(path) == b"second"
    remote.remove_generation(path, remote.entries(path)[""]["generation"])
    assert remote.read(path) is None
    remote.remove_generation(path, seen)


def test_more_objects_than_a_page_are_listed(bucket):
    count = small_bucket.PAGE + 3
    for number in range(count):
        bucket.write(f"run/{number:03d}", b"x")
    assert len(remote.entries(opened("gs://bucket/run"))) == count


def test_a_copy_is_fetched_once_and_again_when_it_has_changed(bucket, tmp_path):
    def written(name, data, *, day):
        bucket.write(name, data)
        bucket.days[name] = day

    written("model/config.json", b"{}", day=1)
    written("model/weights.bin", b"no", day=1)
    copy = local_file("gs://bucket/model", suffixes=(".json",))
    assert copy == tmp_path / ".cache/scalerl_jax/fetched/bucket/model"
    assert [path.name for path in copy.iterdir()] == ["config.json"]
    (copy / "config.json").write_text("[]")  # as large, but of another time
    local_file("gs://bucket/model", suffixes=(".json",))
    assert (copy / "config.json").read_text() == "{}"
    first = (copy / "config.json").stat()
    local_file("gs://bucket/model", suffixes=(".json",))
    assert (copy / "config.json").stat().st_ino == first.st_ino
    written("model/config.json", b"[]", day=2)
    local_file("gs://bucket/model", suffixes=(".json",))
    assert (copy / "config.json").read_text() == "[]"
    one = local_file("gs://bucket/model/weights.bin")
    assert one.read_bytes() == b"no"
    with pytest.raises(ValueError, match="^gs://bucket/none: there is nothing"):
        local_file("gs://bucket/none")


@pytest.mark.parametrize(
    "url", ["s3://bucket/run", "gs://", "gs:///run", "gs://bucket/a/../../b"]
)
def test_another_place_is_refused(url):
    with pytest.raises(ValueError, match="write gs://BUCKET/PATH") as refusal:
        opened(url)
    assert url in str(refusal.value)


def test_a_bucket_that_does_not_exist_is_named(bucket):
    with pytest.raises(ValueError, match="--workdir=gs://other/run: .*'other'"):
        opened("gs://other/run")


@pytest.mark.parametrize("status", [401, 403])
def test_a_bucket_that_lets_us_see_nothing_is_told_with_what_to_do(
    bucket, status, caplog
):
    bucket.denied = status
    with pytest.raises(ValueError) as refusal:
        opened("gs://bucket/run")
    message = str(refusal.value)
    assert "the caller does not have storage.objects.list access" in message
    assert "gcloud auth application-default login" in message
    assert "\n" not in message
    assert not caplog.records


def test_a_bucket_that_fails_again_and_again_may_answer_later(bucket, monkeypatch):
    """That is no mistake of the user's, after which a supervisor gives a run up."""

    async def at_once(_):
        pass

    asyncio = types.SimpleNamespace(sleep=at_once)
    monkeypatch.setattr("gcsfs.retry.asyncio", asyncio)
    bucket.denied = 503
    with pytest.raises(TimeoutError, match="not been reached within 180 s .*503"):
        remote.open_path("gs://bucket/run", setting="params in ", in_run=True)


@pytest.fixture
def silent():
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


IMPATIENT = """
import sys
from scalerl_jax import __main__
from scalerl_jax.formats import remote

remote._FIRST_S = 3.0  # of 10
__main__.main()
"""


def test_without_a_network_a_command_ends_soon_with_one_line(silent, tmp_path):
    """A name that nobody knows, a port where nobody listens, a server that hangs.

    The status is 1, with which a supervisor tries again.
    """
    commands = {
        "status gs://bucket/run": "http://nobody.invalid",
        "data prepare --dataset=jsonl:gs://bucket/rows.jsonl": "http://127.0.0.1:1",
        "fit gs://bucket/run": silent,
        "train --workdir=gs://bucket/run": silent,
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", IMPATIENT, *command.split()],
            env=os.environ | {"STORAGE_EMULATOR_HOST": host, "HOME": str(tmp_path)},
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for command, host in commands.items()
    ]
    for process in started:
        said = process.communicate(timeout=100.0)[1]
        assert (process.returncode, said.count("\n")) == (1, 1), said
        assert re.search("gs://bucket/r.*: the bucket 'bucket' has not been re", said)
        assert "within 3 s" in said and "see to the network" in said


def test_a_bucket_that_has_answered_and_a_run_that_goes_on_wait_longer(
    bucket, monkeypatch
):
    opened("gs://bucket/run")
    monkeypatch.setattr(remote, "_FIRST_S", 0.0)
    opened("gs://bucket/run")
    monkeypatch.setattr(remote, "_answered", set())  # as in a process that is new
    with pytest.raises(TimeoutError, match="not been reached within 0 s"):
        opened("gs://bucket/run")
    remote.open_path("gs://bucket/run", setting="params in ", in_run=True)


def test_a_bucket_that_is_lost_on_the_way_is_one_line(bucket, monkeypatch, tmp_path):
    bucket.write("run/config.json", b"{}")
    path = opened("gs://bucket/run")
    monkeypatch.setattr(remote, "open_path", lambda *_, **__: path)
    bucket.denied = 403
    with pytest.raises(ValueError, match="--workdir=gs://bucket/run "):
        remote.fetch("gs://bucket/run", tmp_path / "copy", setting="--workdir=")

    def silent(_):
        raise TimeoutError

    monkeypatch.setattr(remote, "entries", silent)
    with pytest.raises(TimeoutError, match="--workdir=gs://bucket/run cannot be fetch"):
        remote.fetch("gs://bucket/run", tmp_path / "copy", setting="--workdir=")


def test_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"pip install 'scalerl_jax\[gcs\]'"):
        opened("gs://bucket/run")
