"""Objects: whole, in time and of the size that was published, or refused."""

import threading

import numpy as np
import pytest
import small_bucket
from memory_channel import MemoryChannel

from scalerl_jax.weights.bucket_channel import BucketChannel, remove_channel
from scalerl_jax.weights.channels import (
    DirectoryChannel,
    FullChannelError,
    LostObjectError,
)

BUFFERS = [np.arange(size, dtype=np.uint8) for size in (5, 0, 64, 200)]
SIZE = 269


def directory(tmp_path):
    return DirectoryChannel(tmp_path / "weights", owner="rank0")


def bucket(tmp_path):
    small_bucket.empty()
    return BucketChannel("gs://bucket/weights", owner="rank0")


CHANNELS = {
    "bucket": bucket,
    "directory": directory,
    "memory": lambda _: MemoryChannel(),
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=[small_bucket.NEEDS_EXTRA] if name == "bucket" else [])
        for name in CHANNELS
    ]
)
def channel(request, tmp_path):
    return CHANNELS[request.param](tmp_path)


def fetch(channel, reference, *, num_bytes=SIZE, timeout_s=0.0):
    return channel.fetch(reference, num_bytes=num_bytes, timeout_s=timeout_s)


def test_what_is_fetched_is_what_was_put(channel):
    reference = channel.put("v1", BUFFERS)
    found = fetch(channel, reference)
    assert [each.tolist() for each in found] == [each.tolist() for each in BUFFERS]
    found[0][0] = 77  # they belong to who fetched them
    assert fetch(channel, reference)[0][0] == 0


def test_of_a_channel_that_is_removed_nothing_is_left(tmp_path):
    channel = directory(tmp_path)
    channel.put("v1", BUFFERS)
    remove_channel(str(tmp_path / "weights"))
    remove_channel(str(tmp_path / "weights"))
    assert not (tmp_path / "weights").exists()


@small_bucket.NEEDS_EXTRA
def test_of_a_removed_channel_in_a_bucket_nothing_is_left(caplog):
    objects = small_bucket.empty()
    BucketChannel("gs://bucket/weights", owner="rank0").put("v1", BUFFERS)
    objects.write("run/config.json", b"{}")
    remove_channel("gs://bucket/weights")
    assert objects.names() == ["run/config.json"] and not caplog.records
    objects.denied = 403
    remove_channel("gs://bucket/weights")
    assert "gs://bucket/weights is not removed: " in caplog.text


def test_two_objects_of_one_name_are_two(channel):
    first = channel.put("v1", BUFFERS)
    second = channel.put("v1", BUFFERS[:1])
    assert first != second
    assert len(fetch(channel, first)) == 4
    assert len(fetch(channel, second, num_bytes=5)) == 1


def test_an_object_that_was_discarded_is_not_there(channel):
    reference = channel.put("v1", BUFFERS)
    channel.discard(reference)
    channel.discard(reference)
    with pytest.raises(LostObjectError, match=f"{reference} is not there after 0.01 s"):
        fetch(channel, reference, timeout_s=0.01)


def test_an_object_of_another_size_is_refused(channel):
    reference = channel.put("v1", BUFFERS)
    with pytest.raises(LostObjectError, match="has 269 bytes and not 268"):
        fetch(channel, reference, num_bytes=268)


def test_an_object_that_comes_in_time_is_waited_for(tmp_path):
    reader = DirectoryChannel(tmp_path / "weights")
    path = tmp_path / "weights" / directory(tmp_path).put("v1", BUFFERS)
    hidden = path.rename(path.with_name("elsewhere"))
    timer = threading.Timer(0.1, lambda: hidden.rename(path))
    timer.start()
    assert len(fetch(reader, path.name, timeout_s=30.0)) == 4
    timer.join()


def test_a_file_that_was_discarded_is_not_waited_for_as_long_as_one_that_is_read(
    tmp_path,
):
    reader = DirectoryChannel(tmp_path / "weights", patience_s=0.01)
    with pytest.raises(LostObjectError, match="gone is not there after 0.01 s"):
        fetch(reader, "gone", timeout_s=600.0)


@pytest.mark.parametrize("size", [0, 7, 20, 47, 100, 400])
def test_a_file_that_is_torn_is_refused(tmp_path, size):
    channel = directory(tmp_path)
    reference = channel.put("v1", BUFFERS)
    path = tmp_path / "weights" / reference
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(LostObjectError, match=reference):
        fetch(channel, reference)


@pytest.mark.parametrize(
    "content, words",
    [
        (b"weights2" + bytes(56), "does not begin"),
        (b"weights1" + b"\xff" * 8, "buffers; 1048576 at most"),
        # It says that it has the bytes; so much memory is not asked for.
        (b"weights1" + b"\1" + bytes(7) + b"\0\0\0\0\1" + bytes(3), "bytes follow"),
    ],
)
def test_a_file_of_somebody_else_is_refused_before_it_takes_memory(
    tmp_path, content, words
):
    channel = directory(tmp_path)
    (tmp_path / "weights" / "rank0-v1").write_bytes(content)
    with pytest.raises(LostObjectError, match=words):
        fetch(channel, "rank0-v1", num_bytes=2**32)


@pytest.mark.parametrize("name", ["../secret", ".hidden", "a/b", "", "x" * 300, "a\n"])
def test_a_reference_that_leads_out_of_the_directory_is_refused(tmp_path, name):
    (tmp_path / "secret").write_bytes(b"weights1" + bytes(8))
    with pytest.raises(LostObjectError, match="is no name of an object"):
        fetch(directory(tmp_path), name, num_bytes=0)


def test_an_owner_clears_what_its_predecessor_left_and_nothing_else(tmp_path):
    folder = tmp_path / "weights"
    others = DirectoryChannel(folder, owner="rank01").put("v1", BUFFERS)
    old = directory(tmp_path).put("v1", BUFFERS)
    (folder / ".rank0-v2-torn").write_bytes(b"")
    new = directory(tmp_path).put("v1", BUFFERS)
    assert sorted(path.name for path in folder.iterdir()) == sorted([others, new])
    assert old != new


def test_a_directory_that_cannot_be_written_says_so_and_keeps_nothing(tmp_path):
    channel = directory(tmp_path)
    for path in (tmp_path / "weights", tmp_path / "moved"):
        if path.exists():
            path.rename(tmp_path / "moved")
    with pytest.raises(FullChannelError, match="269 bytes of v1 .* more space"):
        channel.put("v1", BUFFERS)
    assert not list((tmp_path / "moved").iterdir())
