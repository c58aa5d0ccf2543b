"""Two processes that train as one, against one process with as many devices."""

import json
import os
import socket

import jax
import numpy as np
import pytest
import small_processes
from small_processes import (
    SAVED,
    SECRET,
    SHAPES,
    abstract,
    finish,
    make_bench,
    read_result,
    whole,
)

from scalerl_jax.learner.checkpoint import Checkpointer, CheckpointReader
from scalerl_jax.learner.places import CheckpointPlace
from scalerl_jax.parallel import multihost, rendezvous

pytestmark = pytest.mark.slow  # several processes

# Adam's steps are at most rate / eps = 10 times as far off as their gradients.
CLOSE = dict(rtol=1e-5, atol=3e-5)


def ended(processes, **options):
    return [finish(process, **options) for process in processes]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Where two processes trained, saved and restored until one was killed."""
    directory = tmp_path_factory.mktemp("trained")
    theirs = Checkpointer(directory / "theirs", every=1, keep=1)
    state, _ = small_processes.steps(
        SHAPES[1], make_bench(SHAPES[1]).state(), last=SAVED
    )
    small_processes.save(theirs, SAVED, state)
    theirs.close()
    results = ended(small_processes.start("train", directory), timeout_s=400)
    (directory / "ends.json").write_text(json.dumps(results))
    return directory


def assert_leaves_close(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)


def one_process(shape):
    """Leaves and metrics after the steps on four devices of this process, one slice."""
    shape = shape[:4]
    state, history = small_processes.steps(shape, make_bench(shape).state())
    return whole(state), history


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=[str(s) for s in SHAPES])
def test_two_processes_train_as_one(trained, number):
    leaves, history = one_process(SHAPES[number])
    found = [read_result(trained, f"mesh{number}", process) for process in (0, 1)]
    assert found[0][1] == found[1][1]  # every process reads the same metrics
    for process in (0, 1):
        assert_leaves_close(found[process][0], leaves)
        for ours, theirs in zip(found[process][1], history, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                np.testing.assert_allclose(
                    ours[name], value, rtol=1e-4, atol=1e-5, err_msg=name
                )
                assert ours["grad_norm"] > 0.01


def test_a_number_of_one_process_is_named_by_both(trained):
    told = [json.loads((trained / f"not_finite_{each}").read_text()) for each in (0, 1)]
    place = "microbatch 0, row 3, position 5"
    expected = f"the batch's advantages are not: nan in {place} is the first of 1"
    assert told == [[expected], [expected]]


def test_two_processes_go_on_from_their_checkpoint_bit_for_bit(trained):
    through, history = read_result(trained, "mesh0", 0)
    resumed, rest = read_result(trained, "resumed", 0)
    for ours, theirs in zip(resumed, through, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert rest == history[SAVED:]


def test_one_process_goes_on_from_the_checkpoint_of_two(trained):
    checkpointer = Checkpointer(trained / "ours", every=1, keep=1)
    other = SHAPES[2]
    restored = checkpointer.restore(abstract(make_bench(other).state()))
    assert restored.step == SAVED
    state, _ = small_processes.steps(other, restored.state, first=SAVED)
    assert_leaves_close(whole(state), one_process(other)[0])
    # What the first process gave besides its shards.
    assert (restored.host, len(restored.groups)) == ({"process": 0}, 1)
    step, params = CheckpointReader(CheckpointPlace(trained / "ours")).restore_params(
        abstract(make_bench(other).state()).params
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        (step, params),
        (SAVED, checkpointer.restore(abstract(state)).state.params),
    )
    checkpointer.close()


def test_two_processes_go_on_from_the_checkpoint_of_one(trained):
    leaves, _ = one_process(SHAPES[1])
    assert_leaves_close(read_result(trained, "theirs", 0)[0], leaves)


def test_a_file_of_any_process_that_is_damaged_is_found(trained):
    state = abstract(make_bench(SHAPES[0]).state())
    checkpoint = trained / "ours" / f"step_{SAVED:08d}"
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    assert any("process_1" in str(path) for path in files)
    checkpointer = Checkpointer(trained / "ours", every=1, keep=1)
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(RuntimeError, match=f"step {SAVED}: .*{path.name}"):
            checkpointer.restore(state)
        path.write_bytes(content)
    assert checkpointer.restore(state).step == SAVED
    checkpointer.close()


def test_sigterm_to_one_process_stops_all_at_one_step(trained):
    stops = [int((trained / f"stopped_{process}").read_text()) for process in (0, 1)]
    assert stops[0] == stops[1] > 10


def test_a_process_that_is_killed_ends_the_other(trained):
    (first, _, errors), (second, _, _) = json.loads((trained / "ends.json").read_text())
    assert second == -9
    assert first != 0
    assert "unhealthy" in errors
    assert "\n1\n" in errors  # the process that is missing


def test_a_save_that_fails_in_one_process_fails_in_all(tmp_path):
    for status, lines, errors in ended(small_processes.start("full_disk", tmp_path)):
        assert status == 0, errors
        refusal, restored, other, steps = lines
        assert "cannot write the checkpoint of step 2" in refusal
        assert "process 1: " in refusal
        assert "those of steps [1] are untouched" in refusal
        assert restored == "restored 1"
        assert "the step of the checkpoint is 5 in process 1 and 4 in process 0" in (
            other
        )
        assert steps == "[1, 3]"


def test_processes_exchange_agree_and_fail_together(tmp_path):
    (status, lines, errors), (_, other, _) = ended(
        small_processes.start("meet", tmp_path)
    )
    assert status == 0, errors
    assert lines[:2] == other
    assert "ValueError: a setting is 1 in process 1 and 0 in process 0; " in lines[0]
    assert lines[1] == "RuntimeError: process 1: 'lost'"
    assert "TimeoutError: nobody else: process 1 of 2 did not come within 1" in lines[2]


def test_a_process_that_does_not_come_is_named_by_all_others(tmp_path):
    started = small_processes.start("meet", tmp_path, count=4, ids=[0, 2], timeout_s=10)
    for status, _, errors in ended(started):
        assert status == 1
        (line,) = errors.splitlines()
        assert line.startswith("TimeoutError: process 1, 3 of 4 did not come to the ")
        assert "127.0.0.1:" in line


def test_a_coordinator_that_does_not_come_is_named(tmp_path):
    with socket.socket() as nobody:  # has the port, and answers nothing on it
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        started = small_processes.start(
            "meet", tmp_path, ids=[1], port=port, timeout_s=1
        )
        for status, _, errors in ended(started):
            assert status == 1
            (line,) = errors.splitlines()
            assert line.startswith("TimeoutError: process 0 did not answer at --coord")
            assert "Connection refused" in line


@pytest.mark.parametrize(
    "changes, words",
    [
        pytest.param(
            dict(coordinator="localhost"),
            ("--coordinator=localhost", "HOST:PORT"),
            id="no port",
        ),
        pytest.param(
            dict(coordinator="localhost:99999"),
            ("localhost:99999", "65535"),
            id="no such port",
        ),
        pytest.param(
            dict(process_id=2), ("--process_id=2", "--num_processes - 1 = 1"), id="id"
        ),
        pytest.param(dict(process_id=-1), ("--process_id=-1",), id="negative id"),
        pytest.param(
            dict(num_processes=0), ("--num_processes=0", "above 0"), id="none"
        ),
        pytest.param(
            dict(num_processes=10**9), ("--num_processes=1000000000",), id="too many"
        ),
        pytest.param(
            dict(process_id=None), ("--process_id", "all three"), id="not all given"
        ),
    ],
)
def test_wrong_arguments_are_refused_at_once(changes, words):
    arguments = dict(coordinator="localhost:4321", num_processes=2, process_id=0)
    with pytest.raises(ValueError) as refusal:
        rendezvous.find_place(**(arguments | changes))
    for word in words:
        assert word in str(refusal.value)


def test_a_port_that_is_taken_is_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=f"{address}: Address already in use"):
            place = rendezvous.ProcessPlace(
                coordinator=address, num_processes=2, process_id=0
            )
            rendezvous.initialize(place, secret=SECRET)


def test_without_a_cluster_the_arguments_are_asked_for():
    assert not {"SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri"} & os.environ.keys()
    with pytest.raises(ValueError, match="needs --coordinator=HOST:PORT"):
        rendezvous.find_place()


def test_one_process_waits_for_nobody():
    assert multihost.exchange("text", name="a", timeout_s=1) == ["text"]
    multihost.agree("text", name="a", timeout_s=1)
    with pytest.raises(KeyError):
        multihost.together(lambda: {}["key"], name="a", timeout_s=1)
