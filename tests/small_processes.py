"""Several small processes that train as one on the CPU, and what each of them does.

`start` makes the processes; each runs one of the scenarios below and leaves its
results as files in the directory that it was given.
"""

import json
import os
import pickle
import re
import resource
import signal
import socket
import sys
import time
from pathlib import Path

import jax
import numpy as np
import psutil
import small_run
import small_weights
from jax._src import distributed
from jax.sharding import NamedSharding, PartitionSpec
from small_mesh import mesh_of
from small_step import ADAMW, bench, make_sequences

from scalerl_jax.cluster.batch_parts import HeldBatches, SentBatches, arrays_of
from scalerl_jax.learner.checkpoint import Checkpointer
from scalerl_jax.learner.nonfinite import _in_inputs
from scalerl_jax.model.architecture import batch_sharding
from scalerl_jax.parallel import multihost, rendezvous
from scalerl_jax.parallel.multihost import own_box
from scalerl_jax.process.preemption import Preemption
from scalerl_jax.types import Group, Prompt, Rollout
from scalerl_jax.weights.channels import DirectoryChannel
from scalerl_jax.weights.sending import Sender

DEVICES = 2  # of each process
HEARTBEAT_S = 10
SECRET = "0123456789abcdef" * 4
# (data, fsdp, context, tensor, parts of experts, slices): each time, another axis lies
# across the processes; of the first shape each process has a slice.
SHAPES = ((2, 2, 1, 1, 1, 2), (1, 4, 1, 1), (1, 1, 2, 2))
STEPS = 3
SAVED = 2  # steps behind the checkpoint


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(scenario, directory, *, count=2, ids=None, port=None, timeout_s=60):
    """Processes `ids` of `count`, which run a scenario; `finish` waits for one."""
    port = port or free_port()
    path = f"{small_run.ROOT}{os.pathsep}{small_run.ROOT / 'tests'}"
    return [
        small_run.start(
            "-c",
            "import small_processes; small_processes.main()",
            *(scenario, directory, f"127.0.0.1:{port}", count, process, timeout_s),
            environment={"PYTHONPATH": path},
        )
        for process in (range(count) if ids is None else ids)
    ]


def finish(process, *, timeout_s=90):
    """Exit status, the lines of stdout, and stderr."""
    try:
        output, errors = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    # Several threads of gloo's write at once, and break each other's lines.
    gloo = re.compile(r"\[Gloo\]|connected peer ranks")
    lines = [line for line in output.splitlines() if not gloo.search(line)]
    return process.returncode, lines, errors


def make_bench(shape):
    return bench(optimizer=ADAMW, shape=shape, rows=4, row_tokens=16)


def batches():
    """Other rollouts in each step."""
    sequences = make_sequences()
    for step in range(STEPS):
        yield [*sequences[step:], *sequences[:step]][: 8 - step]


def own_rows(batch, sharding):
    """What this process's devices read of a batch, as it comes to a rank."""
    arrays = arrays_of(batch).items()
    boxes = {name: own_box(array.shape[1:], sharding) for name, array in arrays}
    sent = SentBatches()
    sent.meet([boxes])
    (parts,) = sent.parts(batch)
    return HeldBatches().take(pickle.loads(pickle.dumps(parts)))


def assert_same_bits(found, expected):
    """Arrays whose parts here are the same bits."""
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for ours, theirs in leaves:
        parts = zip(ours.addressable_shards, theirs.addressable_shards, strict=True)
        for mine, other in parts:
            assert np.asarray(mine.data).tobytes() == np.asarray(other.data).tobytes()


def steps(shape, state, first=0, last=STEPS):
    """The state after some steps, and the metrics of each as numbers.

    Of several processes each has the rows of its own devices; with all rows the sums
    of the microbatches are the same bits.
    """
    maker, history = make_bench(shape), []
    for sequences in list(batches())[first:last]:
        batch = maker.batch(sequences=sequences)
        if multihost.process_count() > 1:
            whole, batch = batch, own_rows(batch, batch_sharding(mesh_of(shape)))
            totals = [maker.step.total(state.params, each) for each in (whole, batch)]
            assert_same_bits(*totals)
        state, metrics = maker.step(state, batch)
        history.append({name: float(value) for name, value in metrics.items()})
    return state, history


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def whole(state):
    """Every leaf as a NumPy array, whatever the devices of its shards."""
    mesh = jax.tree.leaves(state)[0].sharding.mesh
    everywhere = NamedSharding(mesh, PartitionSpec())
    gather = jax.jit(lambda tree: tree, out_shardings=everywhere)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(gather(state))]


def write_result(directory, name, state, history):
    file = Path(directory) / f"{name}_{multihost.process_index()}"
    np.savez(f"{file}.npz", *whole(state))
    Path(f"{file}.json").write_text(json.dumps(history))


def read_result(directory, name, process):
    file = Path(directory) / f"{name}_{process}"
    with np.load(f"{file}.npz") as arrays:
        leaves = [arrays[key] for key in arrays.files]
    return leaves, json.loads(Path(f"{file}.json").read_text())


def make_group(process):
    rollout = Rollout(
        completion_tokens=np.arange(3, dtype=np.int32),
        completion_mask=np.ones(3, bool),
        behavior_logprobs=np.full(3, -0.5, np.float32),
        policy_versions=np.zeros(3, np.int32),
        cut_off=False,
        interrupted=False,
        reward=1.0,
        passed=True,
        status="ok",
    )
    prompt = Prompt(
        prompt_id=process,
        epoch=0,
        task="chain_sum",
        text="1 + 1 =",
        tokens=np.arange(2, dtype=np.int32),
        reference={},
    )
    return Group(ticket=process, prompt=prompt, rollouts=(rollout,), finished_version=1)


def save(checkpointer, step, state):
    process = multihost.process_index()
    checkpointer.save(
        step,
        state=state,
        host={"process": process},
        groups=[make_group(process)] * (process + 1),
    )


def train(directory):
    """Steps on every mesh; a save, and a restoration, in the midst of one; a death."""
    for number, shape in enumerate(SHAPES):
        result = steps(shape, make_bench(shape).state())
        write_result(directory, f"mesh{number}", *result)
    shape = SHAPES[0]
    checkpointer = Checkpointer(directory / "ours", every=1, keep=2, timeout_s=30)
    state, _ = steps(shape, make_bench(shape).state(), last=SAVED)
    save(checkpointer, SAVED, state)
    restored = checkpointer.restore(abstract(state))
    result = steps(shape, restored.state, first=SAVED)
    write_result(directory, "resumed", *result)
    theirs = Checkpointer(directory / "theirs", every=1, keep=2, timeout_s=30)
    restored = theirs.restore(abstract(make_bench(shape).state()))
    write_result(directory, "theirs", *steps(shape, restored.state, first=SAVED))
    stop_together(directory)
    tell_what_is_not_finite(directory)
    state, _ = steps(shape, make_bench(shape).state(), last=1)
    if multihost.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    steps(shape, state, first=1)


def stop_together(directory):
    """SIGTERM comes to one process; all notice it at one step."""
    with Preemption() as preemption:
        step = 0
        while not preemption.reached(step):
            if step == 10 and multihost.process_index() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            step += 1
            time.sleep(0.02)
    (directory / f"stopped_{multihost.process_index()}").write_text(str(step))


def tell_what_is_not_finite(directory):
    """One process has the row that is not finite; both say so."""
    batch = make_bench(SHAPES[0]).batch()
    spoiled = np.array(batch.advantages)
    spoiled[0, -1, 5] = np.nan
    batch = own_rows(
        batch.replace(advantages=spoiled), batch_sharding(mesh_of(SHAPES[0]))
    )
    told = list(_in_inputs(batch))
    name = f"not_finite_{multihost.process_index()}"
    (directory / name).write_text(json.dumps(told))


def full_disk(directory):
    """The second save fails in one process, whose files may not grow."""
    shape = SHAPES[0]
    state = make_bench(shape).state()
    checkpointer = Checkpointer(directory / "ours", every=1, keep=3, timeout_s=30)
    save(checkpointer, 1, state)
    second = multihost.process_index() == 1
    if second:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, -1))
    try:
        save(checkpointer, 2, state)
    except RuntimeError as error:
        sys.stdout.write(f"{error}\n")
    if second:
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    restored = checkpointer.restore(abstract(state))
    sys.stdout.write(f"restored {restored.step}\n")
    save(checkpointer, 3, state)
    try:
        save(checkpointer, 4 + multihost.process_index(), state)
    except RuntimeError as error:
        sys.stdout.write(f"{error}\n")
    multihost.together(lambda: None, name="the others' look", timeout_s=30)
    sys.stdout.write(f"{checkpointer.steps()}\n")


def meet(directory):
    """What several processes say to each other."""
    mine = multihost.process_index()
    everyone = [str(process) for process in range(multihost.process_count())]
    for _ in range(3):
        assert multihost.exchange(str(mine), name="a", timeout_s=10) == everyone
    multihost.agree("same", name="a setting", timeout_s=10)
    # JAX's coordinator has no port, and no file any more, by which it can be reached.
    port = int(sys.argv[3].rpartition(":")[2])
    for each in psutil.Process().net_connections("inet"):
        assert (each.status, each.laddr.port) != (psutil.CONN_LISTEN, port)
    file = distributed.global_state.coordinator_address.removeprefix("unix:")
    assert file.startswith("/") and not Path(file).exists()

    def fail():
        if mine == 1:
            raise KeyError("lost")

    def late():
        return multihost.exchange("", name="nobody else", timeout_s=1)

    for action in (
        lambda: multihost.agree(str(mine), name="a setting", timeout_s=10),
        lambda: multihost.together(fail, name="an action", timeout_s=10),
        late if mine == 0 else lambda: None,
    ):
        try:
            action()
        except (ValueError, RuntimeError, TimeoutError) as error:
            sys.stdout.write(f"{type(error).__name__}: {error}\n")
    multihost.exchange("", name="the end", timeout_s=10)


def publish(directory):
    """Three versions, each on a mesh over all processes, from each its own shards."""
    rank, count = multihost.process_index(), multihost.process_count()
    for number, axes in enumerate(small_weights.LEARNERS):
        folder = directory / f"weights{number}"
        channel = DirectoryChannel(folder, owner=f"rank{rank}")
        sender = Sender(rank=rank, num_ranks=count, channel=channel)
        for version in range(3):
            shards = small_weights.shards(version, small_weights.mesh(0, 4, **axes))
            manifest = sender.send(shards, policy_version=version)
            (directory / f"{number}-{version}-{rank}").write_text(manifest.to_json())
    multihost.exchange("", name="the end", timeout_s=60)


SCENARIOS = {each.__name__: each for each in (train, full_disk, meet, publish)}


def main():
    scenario, directory, coordinator, count, process, timeout_s = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        rendezvous.initialize(
            rendezvous.ProcessPlace(
                coordinator=coordinator,
                num_processes=int(count),
                process_id=int(process),
            ),
            secret=SECRET,
            timeout_s=float(timeout_s),
            heartbeat_s=HEARTBEAT_S,
        )
    except (ValueError, RuntimeError, TimeoutError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    SCENARIOS[scenario](Path(directory))
