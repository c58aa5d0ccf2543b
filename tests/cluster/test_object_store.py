"""Published params over Ray's object store, and its limits."""

import pytest
import small_run

pytest.importorskip("ray")

# In a process of its own, whose cluster has a tiny store: one actor puts, the
# other fetches.
SCRIPT = """
import sys, time
import numpy as np, ray
from scalerl_jax.cluster.object_store import ObjectStoreChannel
from scalerl_jax.weights.channels import DirectoryChannel, LostObjectError

MB = 1 << 20
ray.init("local", num_cpus=4, object_store_memory=80 * MB, include_dashboard=False,
         log_to_driver=False, logging_level="error")


def buffers(seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(256, size=size, dtype=np.uint8) for size in (15 * MB, 7, MB)]


@ray.remote
class Sender:
    def __init__(self, directory):
        self.channel = ObjectStoreChannel(DirectoryChannel(directory, owner="rank0"))

    def put(self, seed):
        reference = self.channel.put(f"v{seed}", buffers(seed))
        handle = self.channel.handles.get(reference)
        return reference, {} if handle is None else {reference: handle}

    def discard(self, reference):
        self.channel.discard(reference)


@ray.remote
class Receiver:
    def __init__(self, directory):
        directory = DirectoryChannel(directory, patience_s=0.2)
        self.channel = ObjectStoreChannel(directory, patience_s=0.2)

    def fetch(self, reference, handles, seed, size=16 * MB + 7):
        try:
            with self.channel.reaching(handles):
                found = self.channel.fetch(reference, num_bytes=size, timeout_s=30.0)
        except LostObjectError as error:
            return str(error)
        for each in found:
            each[:1] += 0  # they may be changed
        return all(map(np.array_equal, found, buffers(seed)))


def get(call):
    return ray.get(call, timeout=120)


sender, receiver = Sender.remote(sys.argv[1]), Receiver.remote(sys.argv[1])
put = [get(sender.put.remote(seed)) for seed in range(4)]
stored = [bool(handles) for _, handles in put]
assert stored == [True, True, False, False], stored  # half of 80 MB
for seed, (reference, handles) in enumerate(put):
    assert get(receiver.fetch.remote(reference, handles, seed)) is True, seed
# What is let go makes room, and who has its handle still gets it.
get(sender.discard.remote(put[0][0]))
reference, handles = get(sender.put.remote(4))
assert handles
assert get(receiver.fetch.remote(reference, handles, 4)) is True
assert get(receiver.fetch.remote(*put[0], 0)) is True
get(sender.discard.remote(put[2][0]))
said = get(receiver.fetch.remote(*put[2], 2))
assert "is not there after 0.2 s" in said, said
said = get(receiver.fetch.remote(reference, handles, 4, 5))
assert f"has {16 * MB + 7} bytes and not 5" in said, said
ray.kill(sender)
for _ in range(100):  # until its end is known
    said = get(receiver.fetch.remote(reference, handles, 4))
    if said is not True:
        break
    time.sleep(0.2)
assert "is not in the object store any more (OwnerDiedError" in said, said
print("all is as it should be")
"""


@pytest.mark.slow
def test_a_store_without_room_leaves_the_rest_to_the_directory(tmp_path):
    process = small_run.start("-c", SCRIPT, tmp_path)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "all is as it should be" in output
