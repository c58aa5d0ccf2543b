import json
import os
import platform
import subprocess
import sys
import time

import pytest
import small_bucket

from scalerl_jax.formats import remote
from scalerl_jax.run import files as run_files
from scalerl_jax.run.files import BucketLock

pytestmark = small_bucket.NEEDS_EXTRA

HELD = {"host": "far-away", "pid": 77, "boot": "b", "token": "t"}


@pytest.fixture
def bucket():
    return small_bucket.empty()


@pytest.fixture
def directory(bucket):
    return remote.open_path("gs://bucket/run", setting="")


def held_by(bucket, *, silent_s, **changes):
    """A lock of another process, that last spoke so long ago."""
    text = json.dumps(HELD | {"time": time.time() - silent_s} | changes)
    bucket.write("run/.lock", text.encode())


def test_a_second_process_is_refused_with_host_and_process(bucket, directory):
    first = BucketLock(directory)
    first.take()
    with pytest.raises(RuntimeError) as refusal:
        BucketLock(directory).take()
    message = str(refusal.value)
    assert f"process {os.getpid()} on {platform.node()} is using" in message
    assert "--workdir=gs://bucket/run" in message and "\n" not in message
    first.close()
    assert bucket.names() == []
    second = BucketLock(directory)
    second.take()
    second.close()


def test_the_lock_of_another_machine_is_taken_over_when_it_is_silent(bucket, directory):
    held_by(bucket, silent_s=run_files.STALE_S - 30.0)
    with pytest.raises(RuntimeError, match="process 77 on far-away .* lock 270 s ago"):
        BucketLock(directory).take()
    held_by(bucket, silent_s=run_files.STALE_S + 1.0)
    lock = BucketLock(directory)
    lock.take()
    lock.require()
    assert json.loads(bucket.objects["run/.lock"][0])["pid"] == os.getpid()
    lock.close()


def test_the_lock_of_a_process_that_is_gone_from_here_is_taken_over(bucket, directory):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60.0)
    mine = run_files._here()
    if not mine["boot"]:
        pytest.skip("this system does not say which start of it this is")
    held_by(bucket, silent_s=1.0, **mine, pid=os.getpid())
    with pytest.raises(RuntimeError, match=f"process {os.getpid()} on "):
        BucketLock(directory).take()
    # After another boot; in another container, whose processes are not seen here.
    for other in ({"boot": "another"}, {"pids": "pid:[1]"}):
        held_by(bucket, silent_s=1.0, **mine | other, pid=ended.pid)
        with pytest.raises(RuntimeError, match=f"process {ended.pid} on "):
            BucketLock(directory).take()
    held_by(bucket, silent_s=1.0, **mine, pid=ended.pid)
    lock = BucketLock(directory)
    lock.take()
    lock.close()


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"time": "x"}'], ids=repr)
def test_a_lock_that_says_nothing_is_taken_over(bucket, directory, text):
    bucket.write("run/.lock", text)
    lock = BucketLock(directory)
    lock.take()
    lock.close()


def test_it_speaks_and_notices_that_another_has_the_lock(
    bucket, directory, monkeypatch
):
    monkeypatch.setattr(run_files, "SPEAK_EVERY_S", 0.01)
    lock = BucketLock(directory)
    lock.take()
    begun = bucket.objects["run/.lock"][1]
    until(lambda: bucket.objects["run/.lock"][1] > begun)
    lock.require()
    held_by(bucket, silent_s=0.0)
    until(lambda: lock._lost)
    with pytest.raises(RuntimeError, match="process 77 on far-away has its lock"):
        lock.require()
    lock.close()
    assert json.loads(bucket.objects["run/.lock"][0])["pid"] == 77


def test_a_bucket_out_of_reach_for_long_may_be_another_process_s(
    bucket, directory, monkeypatch, caplog
):
    monkeypatch.setattr(run_files, "SPEAK_EVERY_S", 0.01)
    lock = BucketLock(directory)
    lock.take()
    bucket.denied = True
    until(lambda: caplog.records)
    (record,) = caplog.records
    assert "cannot renew gs://bucket/run/.lock (the caller does" in record.getMessage()
    lock.require()
    monkeypatch.setattr(run_files, "STALE_S", 0.0)
    with pytest.raises(RuntimeError, match="has not been reached for 0 s"):
        lock.require()
    bucket.denied = False
    lock.close()


def until(holds):
    deadline = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
